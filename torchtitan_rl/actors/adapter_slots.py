"""Several LoRA models over one frozen base, on one trainer rank: each has a slot, and one slot at a time is in use.

A slot holds what differs between models: adapters, accumulated gradients, the optimizer's moments and step counts, the
policy version. `use_adapter` exchanges the model's slot for another, at the cost of two copies of the adapters.

Ranks up to `trainer.lora.rank` fit. A model of rank r has its first r rows of A and columns of B; the others are zero
in both, so their gradients are zero too, and no optimizer moves them. The product is scaled by alpha / r.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_rl.model import lora

__all__ = ["AdapterSlots"]

_ATTENTION = (".wqkv.", ".wq.", ".wkv.", ".wo.")


@dataclass(kw_only=True, slots=True)
class _Slot:
    lora_rank: int
    trained: frozenset[str]
    """Names of the adapters that train; the others keep B = 0."""
    policy_version: int
    adapters: dict[str, torch.Tensor]
    """By the parameter's name; empty while the slot is in use."""
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    moments: dict[str, dict[str, Any]] = field(default_factory=dict)


class AdapterSlots:
    """One rank's part in keeping several models; every rank of the mesh makes the same calls."""

    def __init__(self, rank: Any):
        """`rank` is the `TrainerRank` whose adapters are exchanged."""
        self.rank = rank
        self._slots: dict[str, _Slot] = {}
        self._used = ""

    def add_adapter(self, name: str, lora_rank: int, seed: int, parts: tuple[str, ...], policy_version: int) -> None:
        """A new model with adapters drawn from `seed`, of the layers of `parts` ("attention", "mlp"). It is in use
        afterwards. Raises ValueError without LoRA and for a rank that does not fit."""
        config = self.rank.config.lora
        if config is None or not 1 <= lora_rank <= config.rank:
            raise ValueError(
                f"lora rank={lora_rank}: the trainer has "
                + ("no adapters (trainer.lora)" if config is None else f"adapters of rank {config.rank} at most")
            )
        self._put_away()
        lora.draw_adapters(self.rank.model, seed)
        for parameter_name, parameter in self._parameters().items():
            _keep(parameter, lora_rank, dim=0 if ".lora_a." in parameter_name else 1)
        self._slots[name] = _Slot(
            lora_rank=lora_rank,
            trained=frozenset(n for n in self._parameters() if _part(n) in parts),
            policy_version=policy_version,
            adapters={},
        )
        self.begin_model(policy_version)
        self._in_use(name)

    def begin_model(self, policy_version: int) -> None:
        """Forgets gradients and moments, and counts versions from `policy_version`."""
        self.rank.optimizers.zero_grad()
        self.rank.clear_moments()
        self.rank.policy_version = policy_version

    def use_adapter(self, name: str) -> None:
        """Exchanges the model for another one that was added."""
        if name == self._used:
            return
        self._put_away()
        slot, optimizers = self._slots[name], list(self.rank.optimizers)
        for parameter_name, parameter in self._parameters().items():
            _local(parameter).copy_(slot.adapters[parameter_name])
            parameter.grad = slot.gradients[parameter_name]
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)
                if moments := slot.moments.get(parameter_name):
                    optimizer.state[parameter] = moments
        slot.adapters, slot.gradients, slot.moments = {}, {}, {}
        self._in_use(name)

    def drop_adapter(self, name: str) -> None:
        """Forgets a model. The model in use is another one from the next `use_adapter` on."""
        del self._slots[name]
        if self._used == name:
            self._used = ""

    def freeze_untrained(self) -> None:
        """Takes the gradients of adapters that do not train, before an optimizer step."""
        slot = self._slots[self._used]
        for name, parameter in self._parameters().items():
            if name not in slot.trained:
                parameter.grad = None

    def _put_away(self) -> None:
        if not self._used:
            return
        slot = self._slots[self._used]
        for name, parameter in self._parameters().items():
            slot.adapters[name] = _local(parameter).clone()
            slot.gradients[name], parameter.grad = parameter.grad, None
            for optimizer in self.rank.optimizers:
                if parameter in optimizer.state:
                    slot.moments[name] = optimizer.state.pop(parameter)
        slot.policy_version = self.rank.policy_version
        self._used = ""

    def _in_use(self, name: str) -> None:
        slot, config = self._slots[name], self.rank.config.lora
        for module in self.rank.model.modules():
            if hasattr(module, "_lora_scaling"):
                module._lora_scaling = config.alpha / slot.lora_rank
        self.rank.exchange.lora = dataclasses.replace(config, rank=slot.lora_rank)
        self.rank.policy_version, self._used = slot.policy_version, name

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.rank.model.named_parameters() if lora.is_adapter(name)}


def _part(name: str) -> str:
    return "attention" if any(layer in name for layer in _ATTENTION) else "mlp"


def _keep(parameter: torch.nn.Parameter, lora_rank: int, *, dim: int) -> None:
    """Zeroes an adapter beyond the first `lora_rank` rows (dim 0) or columns (dim 1)."""
    kept = torch.ones(parameter.shape, dtype=parameter.dtype)
    kept.narrow(dim, lora_rank, parameter.shape[dim] - lora_rank).zero_()
    kept = kept.to(parameter.device)
    if isinstance(parameter, DTensor):
        kept = distribute_tensor(kept, parameter.device_mesh, parameter.placements)
    with torch.no_grad():
        parameter.mul_(kept)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a parameter, without gradient."""
    data = parameter.detach()
    return data.to_local() if isinstance(data, DTensor) else data

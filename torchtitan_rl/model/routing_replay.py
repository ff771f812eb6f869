"""The generator's experts in a trainer's forward: handed to the routers, and compared with the routers' own choice."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from torchtitan_rl.model.experts import ExpertRouter
from torchtitan_rl.types import Routing

__all__ = ["agreement", "expect"]

_METRICS = {"experts": "mismatch/expert_agreement_frac", "choice": "mismatch/expert_choice_frac"}


def expect(model, routing: Routing | None, *, padding: int, device: torch.device) -> None:
    """Hands the generator's experts of packed tokens to the model's routers, for the forward and the backward that
    follow; None: the routers choose. `padding` tokens follow the packed ones, whose experts nobody chose. Raises
    RuntimeError for experts of another model.
    """
    routers = _routers(model)
    if routing is None:
        for router in routers:
            router.expect(None)
        return
    num_layers, top_k = routing.experts.shape[1:]
    if num_layers != len(routers) or any(router.top_k != top_k for router in routers):
        raise RuntimeError(
            f"routing: has {top_k} experts in each of {num_layers} layers, and this model has "
            f"{[router.top_k for router in routers]}; train the model that sampled"
        )
    experts_TLK = routing.experts.to(device, torch.int64, non_blocking=True)
    any_experts = torch.arange(top_k, device=device).expand(padding, num_layers, top_k)
    for router, experts_TK in zip(routers, torch.cat([experts_TLK, any_experts]).unbind(1), strict=True):
        router.expect(experts_TK[None].contiguous(), replays=routing.replayed)  # the experts take a view of them


def agreement(model, mask_T: torch.Tensor) -> dict[str, torch.Tensor]:
    """Metric sums after a forward with the generator's experts: over the T tokens of the microbatch, times the mask,
    the share of layers that sent the token to the generator's experts, and of layers that would have by themselves.
    Tensor-parallel ranks call it together."""
    sums = {}
    for kind, name in _METRICS.items():
        shares_T = _mean_of_layers([router.agreement[kind] for router in _routers(model)])[0, : len(mask_T)]
        sums[name] = (shares_T * mask_T).sum()
    return sums


def _mean_of_layers(agrees_BL: list[torch.Tensor]) -> torch.Tensor:
    """The share of layers that agree, float32 (B, L), on every rank."""
    first = agrees_BL[0]
    if not isinstance(first, DTensor):
        return torch.stack(agrees_BL).float().mean(0)
    parts_BL = [agrees.to_local() for agrees in agrees_BL if isinstance(agrees, DTensor)]
    shares_BL = torch.stack(parts_BL).float().mean(0)
    return DTensor.from_local(shares_BL, first.device_mesh, first.placements, run_check=False).full_tensor()


def _routers(model) -> list[ExpertRouter]:
    """The routers that can take experts, in order of layers."""
    mixtures = (getattr(layer, "moe", None) for layer in model.layers.values())
    return [moe.router for moe in mixtures if moe is not None and isinstance(moe.router, ExpertRouter)]

"""What a step asks of one trainer rank: gradients, an optimizer step, a publication of the weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_pg_timeouts

from torchtitan_rl.actors.operations import TRAINED_ROLES, TRAINER_NEEDS
from torchtitan_rl.config.actors import TrainerConfig
from torchtitan_rl.model.residency import Part
from torchtitan_rl.model.train_step import accumulate_gradients, clip_and_step
from torchtitan_rl.types import Accumulated, LossFunction, Microbatch, OptimParams, OptimStepOutput
from torchtitan_rl.weights.exchange import WeightExchange
from torchtitan_rl.weights.finite import NotFinite

__all__ = ["TrainerSteps", "require"]


class TrainerSteps:
    """The operations of a plain step. `TrainerRank` builds the model, and adds the other operations."""

    config: TrainerConfig
    role: str
    device: torch.device
    model: torch.nn.Module
    optimizers: Any
    parallel_dims: ParallelDims
    exchange: WeightExchange
    parts: dict[str, Part]
    policy_version = 0
    _operations: dict[str, Callable]
    _took_step = False

    def run(self, operation: str, *args) -> Any:
        """The operation's answer; an awaitable when the operation uses the store.

        Raises RuntimeError when a needed part is offloaded, ValueError for an operation that the role lacks.
        """
        require(operation, self.role, self.parts)
        return self._operations[operation](*args)

    def forward_backward(
        self, batches: list[Microbatch], loss_fn: LossFunction, temperature: float, loss_weight: float
    ) -> Accumulated:
        """Adds the gradient of this rank's microbatches, in order."""
        # Sequence parallelism cuts the packed tokens into equal parts.
        sizes = {"temperature": temperature, "loss_weight": loss_weight, "multiple_of": self.parallel_dims.tp}
        return accumulate_gradients(self.model, batches, loss_fn, self.device, **sizes)

    def optim_step(self, params: OptimParams, grad_scale: float) -> OptimStepOutput:
        """Clips the gradient, takes a step and zeroes the gradient; a gradient that is not finite skips the step."""
        given = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
        defaults: dict[str, Any] = {"max_grad_norm": self.config.training.max_norm or float("inf")} | {
            name: getattr(self.config.optimizer, name) for name in ("lr", "betas", "eps", "weight_decay")
        }
        params = OptimParams(**{name: defaults[name] if value is None else value for name, value in given.items()})
        parameters, apart = list(self.model.parameters()), self.parallel_dims.ep_enabled
        norm, stepped = clip_and_step(parameters, self.optimizers, params, grad_scale, expert_parallel=apart)
        self.policy_version += stepped
        if self.device.type == "cuda" and not self._took_step:
            self._tighten_timeouts()
        return OptimStepOutput(grad_norm=norm, lr=params.lr, policy_version=self.policy_version, skipped=not stepped)

    def _tighten_timeouts(self) -> None:
        """Gives later steps a tighter limit than the first, which compiles and allocates. gloo's limit cannot change:
        on a CPU the controller's deadline bounds a step."""
        set_pg_timeouts(timedelta(seconds=self.config.comm.train_timeout_seconds), self.parallel_dims)
        self._took_step = True

    async def push_weights(self, dtype: torch.dtype, transport: str, verify: bool) -> int | NotFinite:
        """Publishes this policy version to the store, parameters cast to `dtype`. Returns the version, or which tensor
        is not finite; then nothing is published."""
        first = await self.exchange.push(self.policy_version, dtype, transport, verify)
        return NotFinite(version=self.policy_version, tensor=first) if first else self.policy_version


def require(operation: str, role: str, parts: Mapping[str, Any]) -> None:
    """Raises RuntimeError unless the device holds the operation's parts (`parts`: a `residency.Part` by name), and
    ValueError for an operation on gradients of a role that does not train."""
    needed = TRAINER_NEEDS[operation]
    if ("gradients" in needed and role not in TRAINED_ROLES) or not all(parts[name].on_device for name in needed):
        _refuse(operation, role, [name for name in needed if not parts[name].on_device])


def _refuse(operation: str, role: str, missing: list[str]) -> None:
    if "gradients" in TRAINER_NEEDS[operation] and role not in TRAINED_ROLES:
        raise ValueError(f"role={role!r}: is only scored; {operation} needs one of {', '.join(TRAINED_ROLES)}")
    raise RuntimeError(
        f"{role}.{operation}: {' and '.join(missing)} offloaded; call it through a TrainingClient, "
        "which brings back what an operation needs"
    )

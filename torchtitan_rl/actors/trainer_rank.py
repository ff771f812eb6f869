"""One trainer rank without actors: model, optimizer, and the parts on the device."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_determinism, set_pg_timeouts

from torchtitan_rl.actors.build import build_model, build_optimizers
from torchtitan_rl.actors.operations import TRAINED_ROLES, TRAINER_NEEDS
from torchtitan_rl.actors.trainer_files import TrainerFiles
from torchtitan_rl.config.actors import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.model.residency import Part, device_bytes, gradient_tensors, model_tensors, optimizer_tensors
from torchtitan_rl.model.scoring import score
from torchtitan_rl.model.train_step import accumulate_gradients, clip_and_step
from torchtitan_rl.types import Accumulated, LossFunction, Microbatch, OptimParams, OptimStepOutput
from torchtitan_rl.weights.exchange import WeightExchange
from torchtitan_rl.weights.role_copies import RoleCopies
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["TrainerRank", "require"]

logger = logging.getLogger(__name__)


class TrainerRank:
    """A torchtitan model, sharded by torchtitan's canonical plan, and an optimizer. The process group must exist.

    A `critic` has a value head; `reference` and `teacher` only score and have no optimizer. `run` executes an operation
    of `operations.TRAINER_NEEDS`: a method of this class, of `WeightExchange`, `RoleCopies` or
    `TrainerFiles`.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model: ModelConfig,
        role: str,
        seed: int,
        device: torch.device,
        store: VersionedStore,
        dump_dir: str,
    ):
        self.config, self.model_config, self.role, self.seed, self.device = config, model, role, seed, device
        self.parts = {"model": Part(), "optimizer": Part(), "gradients": Part()}
        self.policy_version = 0
        self._train_timeout_set = False
        self.parallel_dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        self.parallel_dims.build_mesh()
        set_determinism(self.parallel_dims, device, config.debug, distinct_seed_mesh_dims=[])
        built = build_model(
            config, model, role=role, seed=seed, parallel_dims=self.parallel_dims, device=device, dump_dir=dump_dir
        )
        self.model, self.shape, self.adapter = built.model, built.shape, built.adapter
        tensor_parallel = self.parallel_dims.get_optional_mesh("tp")
        self.tensor_parallel = 0 if tensor_parallel is None else tensor_parallel.get_local_rank(), self.parallel_dims.tp
        """This rank's index in the tensor-parallel group, and the group's size."""
        self.optimizers = None
        if role in TRAINED_ROLES:
            self.optimizers = build_optimizers(config, built.spec, self.model, self.parallel_dims)
        self.exchange = WeightExchange(
            self.model, n_kv_heads=self.shape.n_kv_heads, config=config, device=device, store=store
        )
        doers = (self, self.exchange, RoleCopies(self), TrainerFiles(self))
        self._operations = {
            name: next(getattr(doer, name) for doer in doers if hasattr(doer, name)) for name in TRAINER_NEEDS
        }
        logger.info("model: %s, %d parameters, degrees %s", self.shape, self.shape.num_parameters, self.parallel_dims)

    def run(self, operation: str, *args) -> Any:
        """The operation's answer; an awaitable when the operation uses the store.

        Raises RuntimeError when a needed part is offloaded, ValueError for an operation that the role lacks.
        """
        require(operation, self.role, self.parts)
        return self._operations[operation](*args)

    def forward(
        self, batches: list[Microbatch], temperature: float, top_k: int = 0, hidden: bool = False
    ) -> Accumulated:
        """Scores this rank's microbatches, in order: log-probabilities (a critic: values), and with `top_k` the
        likeliest tokens, with `hidden` the hidden states."""
        result = score(
            self.model,
            batches,
            self.device,
            temperature=temperature,
            multiple_of=self.parallel_dims.tp,
            top_k=top_k,
            hidden=hidden,
        )
        if self.tensor_parallel[0]:  # dispatch reads tensor-parallel rank 0 only, and rows are large
            result.rows = {}
        return result

    def forward_backward(
        self, batches: list[Microbatch], loss_fn: LossFunction, temperature: float, loss_weight: float
    ) -> Accumulated:
        """Adds the gradient of this rank's microbatches, in order."""
        return accumulate_gradients(
            self.model,
            batches,
            loss_fn,
            self.device,
            temperature=temperature,
            loss_weight=loss_weight,
            multiple_of=self.parallel_dims.tp,  # sequence parallelism cuts the packed tokens into equal parts
        )

    def optim_step(self, params: OptimParams, grad_scale: float) -> OptimStepOutput:
        """Clips the gradient, takes a step and zeroes the gradient; a gradient that is not finite skips the step."""
        given = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
        defaults: dict[str, Any] = {"max_grad_norm": self.config.training.max_norm or float("inf")} | {
            name: getattr(self.config.optimizer, name) for name in ("lr", "betas", "eps", "weight_decay")
        }
        params = OptimParams(**{name: defaults[name] if value is None else value for name, value in given.items()})
        parameters, experts_apart = list(self.model.parameters()), self.parallel_dims.ep_enabled
        norm, stepped = clip_and_step(
            parameters, self.optimizers, params, grad_scale=grad_scale, expert_parallel=experts_apart
        )
        self.policy_version += stepped
        if not self._train_timeout_set:  # the first step compiles and allocates; later steps get a tighter limit
            if self.device.type == "cuda":  # gloo's limit cannot change: the controller's deadline bounds a step
                set_pg_timeouts(timedelta(seconds=self.config.comm.train_timeout_seconds), self.parallel_dims)
            self._train_timeout_set = True
        return OptimStepOutput(grad_norm=norm, lr=params.lr, policy_version=self.policy_version, skipped=not stepped)

    def reset_optimizer(self) -> None:
        """Clears moments and step count, for a new phase with another loss."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    async def push_weights(self, dtype: torch.dtype, transport: str, verify: bool) -> int:
        """Publishes this policy version to the store, parameters cast to `dtype`. Returns the version."""
        await self.exchange.push(self.policy_version, dtype, transport, verify)
        return self.policy_version

    # Residency: the parts on the device.

    def offload(self, parts: list[str]) -> None:
        """Moves parts (names of model, optimizer, gradients) to host memory; an offloaded part stays there."""
        for name in parts:
            self.parts[name].offload(self._tensors(name))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # another process on this device can then use the memory

    def onload(self, parts: list[str]) -> None:
        """Moves parts back to the device."""
        for name in parts:
            self.parts[name].onload()

    def residency(self) -> dict[str, int]:
        """Bytes of each part on the device."""
        return {name: device_bytes(self._tensors(name)) for name in self.parts}

    def _tensors(self, part: str) -> list[torch.Tensor]:
        if part == "model":
            return model_tensors(self.model)
        if part == "gradients":
            return gradient_tensors(self.model)
        return optimizer_tensors(self.optimizers) if self.optimizers is not None else []


def require(operation: str, role: str, parts: Mapping[str, Any]) -> None:
    """Raises RuntimeError unless the device holds the operation's parts (`parts`: a `residency.Part` by name), and
    ValueError for an operation on gradients of a role that does not train."""
    needed = TRAINER_NEEDS[operation]
    if "gradients" in needed and role not in TRAINED_ROLES:
        raise ValueError(f"role={role!r}: is only scored; {operation} needs one of {', '.join(TRAINED_ROLES)}")
    missing = [name for name in needed if not parts[name].on_device]
    if missing:
        raise RuntimeError(
            f"{role}.{operation}: {' and '.join(missing)} offloaded; call it through a TrainingClient, "
            "which brings back what an operation needs"
        )

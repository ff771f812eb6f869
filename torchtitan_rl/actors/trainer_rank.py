"""One trainer rank without actors: model, optimizer, and everything that a trainer's mesh can ask of the rank."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_determinism, set_pg_timeouts

from torchtitan_rl.actors.adapter_slots import AdapterSlots
from torchtitan_rl.actors.build import build_model, build_optimizers
from torchtitan_rl.actors.operations import TRAINED_ROLES, Operation, TrainerOperations, needed_parts
from torchtitan_rl.actors.profiling import profiled
from torchtitan_rl.actors.trainer_files import TrainerFiles
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.model.residency import Part, device_bytes, gradient_tensors, model_tensors, optimizer_tensors
from torchtitan_rl.model.scoring import score
from torchtitan_rl.model.train_step import accumulate_gradients, clip_and_step
from torchtitan_rl.record.tracing import served, span
from torchtitan_rl.types import LossFunction, Microbatch, OptimParams, OptimStepOutput, RankOutput
from torchtitan_rl.weights.exchange import WeightExchange
from torchtitan_rl.weights.finite import NotFinite
from torchtitan_rl.weights.pieces import AnyManifest
from torchtitan_rl.weights.role_copies import RoleCopies
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["TrainerRank", "require"]

logger = logging.getLogger(__name__)


def require(operation: Operation, role: str, parts: Mapping[str, Part]) -> None:
    """Raises RuntimeError unless the device holds the parts that the operation needs, and ValueError for an operation
    on gradients of a role that does not train."""
    needed = needed_parts(operation)
    if "gradients" in needed and role not in TRAINED_ROLES:
        raise ValueError(f"role={role!r}: is only scored; {operation.__name__} needs one of {', '.join(TRAINED_ROLES)}")
    if missing := [name for name in needed if not parts[name].on_device]:
        raise RuntimeError(
            f"{role}.{operation.__name__}: {' and '.join(missing)} offloaded; call it through a TrainingClient, "
            "which brings back what an operation needs"
        )


class TrainerRank:
    """A torchtitan model, sharded by torchtitan's canonical plan, and an optimizer. The process group must exist.

    `policy` and `critic` train; `reference`, `teacher` and `reward_model` only score and have no optimizer. `critic`
    and `reward_model` have a value head. Every rank of a mesh gets the same calls in the same order: most of them are
    collective. A method that is an operation of `TrainerOperations` does its work inside `with self.serving(...)`.
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
        self.parallel_dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
        self.parallel_dims.build_mesh()
        set_determinism(self.parallel_dims, device, config.debug, distinct_seed_mesh_dims=[])
        built = build_model(
            config, model, role=role, seed=seed, parallel_dims=self.parallel_dims, device=device, dump_dir=dump_dir
        )
        self.model, self.shape, self.spec = built.model, built.shape, built.spec
        tensor_parallel = self.parallel_dims.get_optional_mesh("tp")
        self.tensor_parallel = 0 if tensor_parallel is None else tensor_parallel.get_local_rank(), self.parallel_dims.tp
        """This rank's index in the tensor-parallel group, and the group's size."""
        self.optimizers = None
        if role in TRAINED_ROLES:
            self.optimizers = build_optimizers(config, built.spec, self.model, self.parallel_dims)
        self.exchange = WeightExchange(
            self.model, n_kv_heads=self.shape.n_kv_heads, config=config, device=device, store=store
        )
        self.copies, self.files, self.adapters = RoleCopies(self), TrainerFiles(self), AdapterSlots(self)
        self.policy_version = 0
        self._took_step = False
        logger.info("model: %s, %d parameters, degrees %s", self.shape, self.shape.num_parameters, self.parallel_dims)

    @contextmanager
    def serving(self, operation: Operation) -> Iterator[None]:
        """The block that does an operation. Raises as `require` does, before anything is done."""
        require(operation, self.role, self.parts)
        with served(f"{self.role}.{operation.__name__}"):
            yield

    # Training and scoring.

    def forward_backward(
        self, microbatches: list[Microbatch], loss_fn: LossFunction, temperature: float, loss_weight: float
    ) -> RankOutput:
        """Adds the gradient of this rank's microbatches, in order."""
        with self.serving(TrainerOperations.forward_backward):
            output = accumulate_gradients(
                self.model,
                microbatches,
                loss_fn,
                self.device,
                temperature=temperature,
                loss_weight=loss_weight,
                multiple_of=self.parallel_dims.tp,  # sequence parallelism cuts the packed tokens into equal parts
            )
            return self._answer(output)

    def optim_step(self, params: OptimParams, grad_scale: float) -> OptimStepOutput:
        """Clips the gradient, takes a step and zeroes the gradient; a gradient that is not finite skips the step."""
        with self.serving(TrainerOperations.optim_step):
            params = self._with_defaults(params)
            with span("clip and step"):
                norm, stepped = clip_and_step(
                    list(self.model.parameters()),
                    self.optimizers,
                    params,
                    grad_scale,
                    expert_parallel=self.parallel_dims.ep_enabled,
                )
            self.policy_version += stepped
            if self.device.type == "cuda" and not self._took_step:
                self._tighten_timeouts()
            return OptimStepOutput(
                grad_norm=norm, lr=params.lr, policy_version=self.policy_version, skipped=not stepped
            )

    def _with_defaults(self, params: OptimParams) -> OptimParams:
        """The parameters with the trainer config's value for each that is None."""
        optimizer = self.config.optimizer
        defaults: dict[str, Any] = {
            "lr": optimizer.lr,
            "betas": optimizer.betas,
            "eps": optimizer.eps,
            "weight_decay": optimizer.weight_decay,
            "max_grad_norm": self.config.training.max_norm or float("inf"),
        }
        unset = [field.name for field in dataclasses.fields(params) if getattr(params, field.name) is None]
        return dataclasses.replace(params, **{name: defaults[name] for name in unset})

    def _tighten_timeouts(self) -> None:
        """Gives later steps a tighter limit than the first, which compiles and allocates. gloo's limit cannot change:
        on a CPU the controller's deadline bounds a step."""
        set_pg_timeouts(timedelta(seconds=self.config.comm.train_timeout_seconds), self.parallel_dims)
        self._took_step = True

    def forward(
        self,
        microbatches: list[Microbatch],
        temperature: float,
        top_k: int = 0,
        hidden: bool = False,
        entropy: bool = False,
    ) -> RankOutput:
        """Scores this rank's microbatches, in order: log-probabilities (a critic: values), and with `top_k` the
        likeliest tokens, with `hidden` the hidden states, with `entropy` the entropies."""
        with self.serving(TrainerOperations.forward):
            output = score(
                self.model,
                microbatches,
                self.device,
                temperature=temperature,
                multiple_of=self.parallel_dims.tp,
                top_k=top_k,
                hidden=hidden,
                entropy=entropy,
            )
            return self._answer(output)

    def _answer(self, output: RankOutput) -> RankOutput:
        """The output without its rows, which are large, on ranks that dispatch does not read: it reads tensor-parallel
        rank 0."""
        return dataclasses.replace(output, rows={}) if self.tensor_parallel[0] else output

    def reset_optimizer(self) -> None:
        """Clears moments and step count, for a new phase with another loss."""
        with self.serving(TrainerOperations.reset_optimizer):
            self.clear_moments()

    def clear_moments(self) -> None:
        """What other operations use of `reset_optimizer`: needs no gradients on the device."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def begin_model(self, policy_version: int) -> None:
        with self.serving(TrainerOperations.begin_model):
            self.adapters.begin_model(policy_version)

    # Weights, through the store.

    def reserve_weights(self, dtype: torch.dtype, transport: str) -> None:
        with self.serving(TrainerOperations.reserve_weights):
            self.exchange.reserve(dtype, transport)

    async def push_weights(
        self, dtype: torch.dtype, transport: str, verify: bool, adapters_apart: bool
    ) -> AnyManifest | NotFinite | int:
        """Writes this policy version to where generators can read it, parameters cast to `dtype`: its weights with
        adapters merged in, or with `adapters_apart` the adapters alone, before the first of them the base. Rank 0
        returns the manifest, or which tensor is not finite; the others the version's number."""
        with self.serving(TrainerOperations.push_weights):
            if adapters_apart:
                written = await self.exchange.push_adapters(self.policy_version, dtype, transport, verify)
            else:
                written = await self.exchange.push(self.policy_version, dtype, transport, verify)
            return self.policy_version if written is None else written

    def discard_weights(self, version: int | str) -> None:
        with self.serving(TrainerOperations.discard_weights):
            self.exchange.discard_weights(version)

    async def push_copy(self, transport: str) -> None:
        with self.serving(TrainerOperations.push_copy):
            await self.copies.push_copy(transport)

    async def pull_copy(self) -> None:
        with self.serving(TrainerOperations.pull_copy):
            await self.copies.pull_copy()

    async def push_head(self, transport: str) -> None:
        with self.serving(TrainerOperations.push_head):
            await self.copies.push_head(transport)

    async def pull_head(self) -> None:
        with self.serving(TrainerOperations.pull_head):
            await self.copies.pull_head()

    # Files.

    def init_model(self, path: str) -> None:
        with self.serving(TrainerOperations.init_model):
            self.files.init_model(path)

    def stage_checkpoint(self, path: str) -> None:
        with self.serving(TrainerOperations.stage_checkpoint):
            self.files.stage_checkpoint(path)

    def checkpoint_written(self) -> dict[str, list] | None:
        with self.serving(TrainerOperations.checkpoint_written):
            return self.files.checkpoint_written()

    def remove_checkpoint(self, path: str) -> None:
        with self.serving(TrainerOperations.remove_checkpoint):
            self.files.remove_checkpoint(path)

    def load_checkpoint(self, path: str, policy_version: int) -> None:
        with self.serving(TrainerOperations.load_checkpoint):
            self.files.load_checkpoint(path, policy_version)

    def load_weights(self, path: str, policy_version: int) -> None:
        with self.serving(TrainerOperations.load_weights):
            self.files.load_weights(path, policy_version)

    def save_hf_model(self, path: str, eos: int, pad: int) -> None:
        with self.serving(TrainerOperations.save_hf_model):
            self.files.save_hf_model(path, eos, pad)

    def save_adapter(self, path: str) -> None:
        with self.serving(TrainerOperations.save_adapter):
            self.files.save_adapter(path)

    def parameters(self) -> dict[str, torch.Tensor]:
        with self.serving(TrainerOperations.parameters):
            return self.files.parameters()

    def gradients(self) -> dict[str, torch.Tensor | None]:
        with self.serving(TrainerOperations.gradients):
            return self.files.gradients()

    def moments(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        with self.serving(TrainerOperations.moments):
            return self.files.moments()

    # Several LoRA models over one base.

    def add_adapter(self, name: str, lora_rank: int, seed: int, parts: tuple[str, ...], policy_version: int) -> None:
        with self.serving(TrainerOperations.add_adapter):
            self.adapters.add_adapter(name, lora_rank, seed, parts, policy_version)

    def use_adapter(self, name: str) -> None:
        with self.serving(TrainerOperations.use_adapter):
            self.adapters.use_adapter(name)

    def drop_adapter(self, name: str) -> None:
        with self.serving(TrainerOperations.drop_adapter):
            self.adapters.drop_adapter(name)

    def freeze_untrained(self) -> None:
        with self.serving(TrainerOperations.freeze_untrained):
            self.adapters.freeze_untrained()

    # The device, and what somebody sees of it.

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

    def profile(self, file: str) -> None:
        """Begins to profile this process; with `file`, ends and writes the trace there."""
        profiled(file)

    def _tensors(self, part: str) -> list[torch.Tensor]:
        if part == "model":
            return model_tensors(self.model)
        if part == "gradients":
            return gradient_tensors(self.model)
        return optimizer_tensors(self.optimizers) if self.optimizers is not None else []

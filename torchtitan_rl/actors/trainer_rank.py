"""One trainer rank without actors: model, optimizer, and the parts on the device."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_determinism

from torchtitan_rl.actors.adapter_slots import AdapterSlots
from torchtitan_rl.actors.build import build_model, build_optimizers
from torchtitan_rl.actors.operations import TRAINED_ROLES, TRAINER_NEEDS
from torchtitan_rl.actors.profiling import profiled
from torchtitan_rl.actors.trainer_files import TrainerFiles
from torchtitan_rl.actors.trainer_steps import TrainerSteps
from torchtitan_rl.config.actors import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.model.residency import Part, device_bytes, gradient_tensors, model_tensors, optimizer_tensors
from torchtitan_rl.model.scoring import score
from torchtitan_rl.types import Accumulated, Microbatch
from torchtitan_rl.weights.exchange import WeightExchange
from torchtitan_rl.weights.role_copies import RoleCopies
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["TrainerRank"]

logger = logging.getLogger(__name__)


class TrainerRank(TrainerSteps):
    """A torchtitan model, sharded by torchtitan's canonical plan, and an optimizer. The process group must exist.

    A `critic` has a value head; `reference` and `teacher` only score and have no optimizer. `run` executes an operation
    of `operations.TRAINER_NEEDS`: a method of this class, of `WeightExchange`, `RoleCopies`,
    `TrainerFiles` or `AdapterSlots`.
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
        doers = (self, self.exchange, RoleCopies(self), TrainerFiles(self), AdapterSlots(self))
        self._operations = {
            name: next(getattr(doer, name) for doer in doers if hasattr(doer, name)) for name in TRAINER_NEEDS
        }
        logger.info("model: %s, %d parameters, degrees %s", self.shape, self.shape.num_parameters, self.parallel_dims)

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

    def reset_optimizer(self) -> None:
        """Clears moments and step count, for a new phase with another loss."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    def profile(self, file: str) -> None:
        """Begins to profile this process; with `file`, ends and writes the trace there."""
        profiled(file)

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

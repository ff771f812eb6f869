"""The trainer actor. Endpoints delegate to a `TrainerRank`, which only the actor's process imports."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint

from torchtitan_rl import platform
from torchtitan_rl.actors.process import heavy_imports, prepare_process
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.types import LossFunction, Microbatch, OptimParams, OptimStepOutput, RankOutput
from torchtitan_rl.weights.finite import NotFinite
from torchtitan_rl.weights.pieces import AnyManifest

__all__ = ["PolicyTrainer"]


class PolicyTrainer(Actor):
    """One rank of the mesh of a role: policy, reference, critic, teacher or reward model.

    Calls run one at a time in the order sent, so a caller may submit `forward_backward` and `optim_step` before
    awaiting either. The endpoints are those of `operations.TrainerOperations`, which says what each does.
    """

    Config = TrainerConfig

    def __init__(
        self, config: TrainerConfig, model: ModelConfig, role: str, seed: int, log_dir: str | None, store_name: str
    ):
        self.config, self.model, self.role, self.seed = config, model, role, seed
        self.log_dir, self.store_name = log_dir, store_name

    @endpoint
    async def pid(self) -> int:
        """The process id."""
        return os.getpid()

    @endpoint
    async def setup(self) -> None:
        """Joins the mesh's process group, builds the model, loads or draws weights."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        threads = self.config.num_threads or max(1, platform.num_cores() // int(os.environ["LOCAL_WORLD_SIZE"]))
        prepare_process(self.role, rank, world_size, threads, self.log_dir)
        if self.config.nice is not None:
            os.nice(self.config.nice)  # of this thread and of those that it starts, not of Monarch's, which take calls
        with heavy_imports():
            from torchtitan_rl.actors.trainer_rank import TrainerRank
            from torchtitan_rl.weights.store import WeightStore

        device = platform.local_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            platform.distributed_backend(), timeout=timedelta(seconds=self.config.comm.init_timeout_seconds)
        )
        self.rank = TrainerRank(
            self.config, self.model, self.role, self.seed, device, WeightStore(self.store_name), self.log_dir or ""
        )

    # Training and scoring.

    @endpoint
    async def forward_backward(
        self, microbatches: list[Microbatch], loss_fn: LossFunction, temperature: float, loss_weight: float
    ) -> RankOutput:
        return self.rank.forward_backward(microbatches, loss_fn, temperature, loss_weight)

    @endpoint
    async def optim_step(self, params: OptimParams, grad_scale: float) -> OptimStepOutput:
        return self.rank.optim_step(params, grad_scale)

    @endpoint
    async def forward(
        self, microbatches: list[Microbatch], temperature: float, top_k: int, hidden: bool, entropy: bool
    ) -> RankOutput:
        return self.rank.forward(microbatches, temperature, top_k, hidden, entropy)

    @endpoint
    async def reset_optimizer(self) -> None:
        self.rank.reset_optimizer()

    @endpoint
    async def begin_model(self, policy_version: int) -> None:
        self.rank.begin_model(policy_version)

    # Weights, through the store.

    @endpoint
    async def reserve_weights(self, dtype: torch.dtype, transport: str) -> None:
        self.rank.reserve_weights(dtype, transport)

    @endpoint
    async def push_weights(
        self, dtype: torch.dtype, transport: str, verify: bool, adapters_apart: bool
    ) -> AnyManifest | NotFinite | int:
        return await self.rank.push_weights(dtype, transport, verify, adapters_apart)

    @endpoint
    async def discard_weights(self, version: int | str) -> None:
        self.rank.discard_weights(version)

    @endpoint
    async def push_copy(self, transport: str) -> None:
        await self.rank.push_copy(transport)

    @endpoint
    async def pull_copy(self) -> None:
        await self.rank.pull_copy()

    @endpoint
    async def push_head(self, transport: str) -> None:
        await self.rank.push_head(transport)

    @endpoint
    async def pull_head(self) -> None:
        await self.rank.pull_head()

    # Files.

    @endpoint
    async def init_model(self, path: str) -> None:
        self.rank.init_model(path)

    @endpoint
    async def stage_checkpoint(self, path: str) -> None:
        self.rank.stage_checkpoint(path)

    @endpoint
    async def checkpoint_written(self) -> dict[str, list] | None:
        return self.rank.checkpoint_written()

    @endpoint
    async def remove_checkpoint(self, path: str) -> None:
        self.rank.remove_checkpoint(path)

    @endpoint
    async def load_checkpoint(self, path: str, policy_version: int) -> None:
        self.rank.load_checkpoint(path, policy_version)

    @endpoint
    async def load_weights(self, path: str, policy_version: int) -> None:
        self.rank.load_weights(path, policy_version)

    @endpoint
    async def save_hf_model(self, path: str, eos: int, pad: int) -> None:
        self.rank.save_hf_model(path, eos, pad)

    @endpoint
    async def save_adapter(self, path: str) -> None:
        self.rank.save_adapter(path)

    @endpoint
    async def parameters(self) -> dict[str, torch.Tensor]:
        return self.rank.parameters()

    @endpoint
    async def gradients(self) -> dict[str, torch.Tensor | None]:
        return self.rank.gradients()

    @endpoint
    async def moments(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return self.rank.moments()

    # Several LoRA models over one base.

    @endpoint
    async def add_adapter(
        self, name: str, lora_rank: int, seed: int, parts: tuple[str, ...], policy_version: int
    ) -> None:
        self.rank.add_adapter(name, lora_rank, seed, parts, policy_version)

    @endpoint
    async def use_adapter(self, name: str) -> None:
        self.rank.use_adapter(name)

    @endpoint
    async def drop_adapter(self, name: str) -> None:
        self.rank.drop_adapter(name)

    @endpoint
    async def freeze_untrained(self) -> None:
        self.rank.freeze_untrained()

    # The device, and what somebody sees of it.

    @endpoint
    async def offload(self, parts: list[str]) -> None:
        self.rank.offload(parts)

    @endpoint
    async def onload(self, parts: list[str]) -> None:
        self.rank.onload(parts)

    @endpoint
    async def residency(self) -> dict[str, int]:
        return self.rank.residency()

    @endpoint
    async def profile(self, file: str) -> None:
        self.rank.profile(file)

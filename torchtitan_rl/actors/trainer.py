"""The trainer actor. Endpoints delegate to a `TrainerRank`, which only the actor's process imports."""

from __future__ import annotations

import inspect
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from monarch.actor import Actor, endpoint

from torchtitan_rl import platform
from torchtitan_rl.actors.process import heavy_imports, prepare_process
from torchtitan_rl.config.actors import TrainerConfig
from torchtitan_rl.config.model import ModelConfig

__all__ = ["PolicyTrainer"]


class PolicyTrainer(Actor):
    """One rank of the mesh of a role: policy, reference, critic or teacher.

    Calls run one at a time in the order sent, so a caller may submit `forward_backward` and `optim_step` before
    awaiting either.
    """

    Config = TrainerConfig

    def __init__(
        self, config: TrainerConfig, model: ModelConfig, role: str, seed: int, log_dir: str | None, store_name: str
    ):
        self.config, self.model, self.role, self.seed = config, model, role, seed
        self.log_dir, self.store_name = log_dir, store_name

    @endpoint
    async def where(self) -> int:
        """The process id."""
        return os.getpid()

    @endpoint
    async def setup(self) -> None:
        """Joins the mesh's process group, builds the model, loads or draws weights."""
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        threads = self.config.num_threads or max(1, platform.num_cores() // int(os.environ["LOCAL_WORLD_SIZE"]))
        prepare_process(self.role, rank, world_size, threads, self.log_dir)
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

    @endpoint
    async def run(self, operation: str, *args) -> Any:
        """Runs an operation of `operations.TRAINER_NEEDS`."""
        answer = self.rank.run(operation, *args)
        return await answer if inspect.isawaitable(answer) else answer

    @endpoint
    async def profile(self, file: str) -> None:
        self.rank.profile(file)

    @endpoint
    async def offload(self, parts: list[str]) -> None:
        self.rank.offload(parts)

    @endpoint
    async def onload(self, parts: list[str]) -> None:
        self.rank.onload(parts)

    @endpoint
    async def residency(self) -> dict[str, int]:
        return self.rank.residency()

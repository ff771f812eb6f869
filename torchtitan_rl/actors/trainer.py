"""The trainer actor: endpoints as doorways to a `TrainerRank`, which is imported in the actor's process only."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from monarch.actor import Actor, endpoint

from torchtitan_rl import platform
from torchtitan_rl.actors.process import heavy_imports, prepare_process
from torchtitan_rl.config.actors import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.types import OptimParams, OptimStepOutput

__all__ = ["PolicyTrainer"]


class PolicyTrainer(Actor):
    """One rank of a mesh that holds a model of some role: policy, reference, critic or teacher.

    Endpoints run one at a time in the order they were sent, so `forward_backward` and `optim_step` may be
    submitted before either is awaited.
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
        """Joins the mesh's process group, builds the model, loads or draws its weights."""
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
    async def forward(self, batches: list, temperature: float, top_k: int, hidden: bool):
        return self.rank.forward(batches, temperature, top_k, hidden)

    @endpoint
    async def forward_backward(self, batches: list, loss_fn, temperature: float, loss_weight: float):
        return self.rank.forward_backward(batches, loss_fn, temperature, loss_weight)

    @endpoint
    async def optim_step(self, params: OptimParams, grad_scale: float) -> OptimStepOutput:
        return self.rank.optim_step(params, grad_scale)

    @endpoint
    async def reset_optimizer(self) -> None:
        self.rank.reset_optimizer()

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
    async def init_model(self, path: str) -> None:
        self.rank.init_model(path)

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

    @endpoint
    async def push_weights(self, dtype: torch.dtype, transport: str, verify: bool) -> int:
        return await self.rank.push_weights(dtype, transport, verify)

    @endpoint
    async def discard_weights(self, version: int | str) -> None:
        self.rank.discard_weights(version)

    @endpoint
    async def save_checkpoint(self, path: str) -> None:
        self.rank.save_checkpoint(path)

    @endpoint
    async def load_checkpoint(self, path: str, policy_version: int, optimizer: bool) -> None:
        self.rank.load_checkpoint(path, policy_version, optimizer)

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

"""A run in one process on one device: trainers and generators as plain objects instead of actors.

For debugging: trainer code, losses and rewards run on the calling thread, where `breakpoint()` works. vLLM's engine has
a thread of its own. No process is started.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from torchtitan_rl import adapters, platform
from torchtitan_rl.actors.process import heavy_imports, setup_logs
from torchtitan_rl.config.meshes import GeneratorConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.local_mesh import LocalMesh
from torchtitan_rl.launch.backend import MeshLauncher, Stack
from torchtitan_rl.launch.inventory import use_interface_of
from torchtitan_rl.launch.stack import start_generators, start_stack
from torchtitan_rl.record.schedule import Schedules
from torchtitan_rl.weights.versioned import MemoryStore

__all__ = ["LocalLauncher"]

logger = logging.getLogger(__name__)


@dataclass
class LocalLauncher(MeshLauncher):
    """Makes meshes of one rank a role. `validation.run.check_local` has refused layouts of several ranks."""

    log_dir: str
    start_timeout_s: float
    call_timeout_s: float
    schedules: Schedules | None = None
    """Where the generator records its schedule, and which it follows; None: nowhere, and none."""
    store: MemoryStore = field(default_factory=MemoryStore)
    one_host: bool = True
    attached: bool = False
    shares_cores: bool = False
    """False: trainers compute on the calling thread, with all of them."""
    takes_replicas: bool = False
    _trainers: list = field(default_factory=list)
    _generators: list = field(default_factory=list)
    _joined: bool = False
    _num_threads: int = 0
    """torch's number of threads for the trainers, which compute on the calling thread."""
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Roles start one at a time: each seeds and draws from the random state of the process."""

    async def start(self, config: RunConfig, model_dir: Path, *, eos: int) -> Stack:
        return await start_stack(config, self, model_dir)

    async def start_generators(self, config: RunConfig, model_dir: Path) -> Stack:
        return await start_generators(config, self, model_dir)

    async def start_trainer(
        self, config: TrainerConfig, model: ModelConfig, *, role: str, seed: int, share_with: str | None = None
    ) -> LocalMesh:
        """A trainer rank that holds its model. All roles share one process group."""
        async with self._starting:
            self._join(config.num_threads)
            with heavy_imports():
                from torchtitan_rl.actors.trainer_rank import TrainerRank

            rank = TrainerRank(config, model, role, seed, platform.local_device(0), self.store, self.log_dir)
            self._trainers.append(rank)
        return LocalMesh(role, rank, timeout_s=self.call_timeout_s, in_order=True)

    async def start_generator(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        *,
        role: str,
        seed: int,
        share_with: str | None = None,
        host: int | None = None,
    ) -> LocalMesh:
        """A generator whose engine is ready, on a thread of its own, and holds no weights yet."""
        async with self._starting:
            self._join(config.num_threads)
            platform.local_device(0)
            threads = platform.set_threads(config.num_threads)  # the engine's thread begins with this number
            with _without_dynamo(eager=config.compiles_nothing):
                with heavy_imports():
                    from torchtitan_rl.actors.generator_rank import GeneratorRank

                rank = GeneratorRank(
                    config,
                    model,
                    seed,
                    0,
                    self.store,
                    sleeps=share_with is not None,
                    role=role,
                    schedules=self.schedules,
                )
                self._generators.append(rank)
                mesh = LocalMesh(role, rank, timeout_s=self.call_timeout_s, in_order=False)
                await mesh.call_all(GeneratorRank.start, threads, timeout_s=self.start_timeout_s)
            platform.set_threads(self._num_threads)
        return mesh

    async def stop_generator(self, role: str) -> None:
        """Raises RuntimeError: the engine of this process stays until the run ends."""
        raise RuntimeError(f"{role}: cannot leave a run of one process; use --backend actors")

    async def start_store(self) -> None:
        """Does nothing: `store` exists from the beginning."""

    def repair(self, config: GeneratorConfig) -> None:
        """None: an engine that is lost in this process is not replaced."""

    def _join(self, num_threads: int) -> None:
        """Sets up logs, threads and a process group of one rank, on the first call. vLLM uses the group too."""
        if self._joined:
            return
        if dist.is_initialized():
            raise RuntimeError(
                "backend='local': this process has a torch.distributed process group already; close the "
                "other local run first, or use a process of its own"
            )
        setup_logs("local", 0, 1, self.log_dir)
        use_interface_of("127.0.0.1")  # gloo listens, although it has nobody to talk to
        self._num_threads = platform.set_threads(num_threads)
        dist.init_process_group(platform.distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
        self._joined = True

    async def stop(self) -> None:
        """Ends the engines' threads and destroys the process group, so that another run may follow in this process."""
        for rank in self._generators:
            await asyncio.to_thread(rank.engine.close)
        for rank in self._trainers:
            rank.exchange.close()
        await self.store.stop()
        self._generators.clear()
        self._trainers.clear()
        if self._joined and dist.is_initialized():  # vLLM's engine may have destroyed the group
            dist.destroy_process_group()
        self._joined = False

    def kill(self) -> None:
        """Does nothing: the run has no process but this one."""


@contextmanager
def _without_dynamo(*, eager: bool):
    """Sets TORCHDYNAMO_DISABLE while vLLM is imported and built, then restores it: processes that this process starts
    would inherit the variable."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    adapters.prepare_vllm(eager=eager)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TORCHDYNAMO_DISABLE", None)

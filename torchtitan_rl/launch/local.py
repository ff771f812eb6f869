"""A run in one process on one device: the parts that `launch.Launcher` starts as actors, made here instead.

For debugging: trainer code, losses and rewards run on the thread that called, where `breakpoint()` works; vLLM's engine
keeps its thread. Nothing is started, so nothing is left behind.
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
from torchtitan_rl.config.actors import GeneratorConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.dispatch.local_mesh import LocalMesh
from torchtitan_rl.weights.versioned import MemoryStore

__all__ = ["LocalLauncher"]

logger = logging.getLogger(__name__)


@dataclass
class LocalLauncher:
    """`launch.Launcher`'s interface. Layouts of more than one rank have been refused (`validation.check_local`)."""

    log_dir: str
    start_timeout_s: float
    call_timeout_s: float
    store: MemoryStore = field(default_factory=MemoryStore)
    one_host: bool = True
    attached: bool = False
    _trainers: list = field(default_factory=list)
    _generators: list = field(default_factory=list)
    _joined: bool = False
    _num_threads: int = 0
    """Of this thread, which the trainers compute on."""
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One part starts at a time: they seed and draw from the process's random state."""

    async def start_trainer(
        self, config: TrainerConfig, model: ModelConfig, *, role: str, seed: int, share_with: str | None = None
    ) -> LocalMesh:
        """A rank that holds its model; all roles are in the one process group."""
        async with self._starting:
            self._join(config.num_threads)
            with heavy_imports():
                from torchtitan_rl.actors.trainer_rank import TrainerRank

            rank = TrainerRank(config, model, role, seed, platform.local_device(0), self.store, self.log_dir)
            self._trainers.append(rank)
        return LocalMesh(role, rank, timeout_s=self.call_timeout_s, in_order=True)

    async def start_generator(
        self, config: GeneratorConfig, model_dir: Path, *, role: str, seed: int, share_with: str | None = None
    ) -> LocalMesh:
        """An engine, ready, on a thread of its own; it holds no weights yet."""
        async with self._starting:
            self._join(config.num_threads)
            platform.local_device(0)
            threads = platform.set_threads(config.num_threads)  # the engine's thread begins with this number
            with _without_dynamo(eager=config.enforce_eager):
                with heavy_imports():
                    from torchtitan_rl.actors.generator_rank import GeneratorRank

                class Replica(GeneratorRank):
                    async def abort(self) -> None:
                        """Nothing of a lost replica can be ended here: its thread has ended, or hangs."""

                rank = Replica(config, str(model_dir), seed, 0, self.store, sleeps=share_with is not None)
                self._generators.append(rank)
                mesh = LocalMesh(role, rank, timeout_s=self.call_timeout_s, in_order=False)
                await mesh.call_all("start", threads, timeout_s=self.start_timeout_s)
            platform.set_threads(self._num_threads)
        return mesh

    async def start_store(self) -> None:
        """It is there already."""

    def _join(self, num_threads: int) -> None:
        """Once: logs, threads, and a process group of one, which vLLM takes over as it finds it."""
        if self._joined:
            return
        if dist.is_initialized():
            raise RuntimeError(
                "backend='local': this process has a torch.distributed process group already; close the "
                "other local run first, or use a process of its own"
            )
        setup_logs("local", 0, 1, self.log_dir)
        self._num_threads = platform.set_threads(num_threads)
        dist.init_process_group(platform.distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
        self._joined = True

    async def stop(self) -> None:
        """Ends the engine's thread and leaves the process group, so that another run may follow in this process."""
        for rank in self._generators:
            await asyncio.to_thread(rank.engine.close)
        for rank in self._trainers:
            rank.exchange.close()
        await self.store.stop()
        self._generators.clear()
        self._trainers.clear()
        if self._joined and dist.is_initialized():  # vLLM's engine destroys it as it ends
            dist.destroy_process_group()
        self._joined = False

    def kill(self) -> None:
        """There is no process to kill; whoever was interrupted ends this one."""


@contextmanager
def _without_dynamo(*, eager: bool):
    """While vLLM is imported and built. Not longer: it would hold for processes this one may start."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    adapters.prepare_vllm(eager=eager)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TORCHDYNAMO_DISABLE", None)

"""Starting and stopping the processes of a run: meshes of actors on this host."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "1s")  # notice a dead process within a second

import monarch.actor  # noqa: E402
import torch  # noqa: E402
from monarch.actor import this_host  # noqa: E402
from monarch.spmd import setup_torch_elastic_env_async  # noqa: E402

from torchtitan_rl import platform  # noqa: E402
from torchtitan_rl.actors.config import GeneratorConfig, TrainerConfig  # noqa: E402
from torchtitan_rl.actors.generator import Generator  # noqa: E402
from torchtitan_rl.actors.trainer import PolicyTrainer  # noqa: E402
from torchtitan_rl.dispatch.role_mesh import RoleMesh, deadline  # noqa: E402
from torchtitan_rl.model.config import ModelConfig  # noqa: E402

__all__ = ["Launcher", "prepare_environment"]

logger = logging.getLogger(__name__)


def prepare_environment() -> None:
    """Environment that actor processes inherit; what the user has set stays."""
    defaults = {
        # Processes share the cores; a thread that spins while it waits for work takes them from the others.
        "OMP_WAIT_POLICY": "passive",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if platform.device_type() == "cuda":
        del defaults["OMP_WAIT_POLICY"]
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@dataclass
class Launcher:
    """Spawns role meshes and remembers them, so that `stop` leaves nothing behind."""

    log_dir: str | None
    start_timeout_s: float
    call_timeout_s: float
    failures: list[str] = field(default_factory=list)
    """What died without being asked to, as Monarch reported it."""
    pids: list[int] = field(default_factory=list)
    store_name: str = field(default_factory=lambda: f"weights-{uuid.uuid4().hex[:8]}")
    """Of this run's TorchStore; a process may hold several runs."""
    store: Any = None
    _meshes: list[Any] = field(default_factory=list)
    _num_placed: int = 0

    def __post_init__(self) -> None:
        prepare_environment()
        # Unset, a failure nobody awaits would end this process; here the calls that wait on it raise instead.
        monarch.actor.unhandled_fault_hook = lambda failure: self.failures.append(str(failure))

    async def start_trainer(
        self, config: TrainerConfig, model: ModelConfig, *, role: str, seed: int, share_with: str | None = None,
    ) -> RoleMesh:
        """A trainer mesh whose ranks hold their models."""
        procs = await self._spawn(role, config.num_ranks)
        await self._in_time(setup_torch_elastic_env_async(procs), f"{role}: rendezvous")
        actors = procs.spawn(role, PolicyTrainer, config, model, role, seed, self.log_dir, self.store_name)
        return await self._set_up(RoleMesh(
            role, actors, num_ranks=config.num_ranks,
            tensor_parallel_size=config.parallelism.tensor_parallel_degree, timeout_s=self.call_timeout_s))

    async def start_generator(
        self, config: GeneratorConfig, model_dir: Path, *, role: str, seed: int, share_with: str | None = None,
    ) -> RoleMesh:
        """One generator replica whose engine is ready; it holds no weights yet."""
        ranks = config.tensor_parallel_degree
        procs = await self._spawn(role, ranks)
        if ranks > 1:
            await self._in_time(setup_torch_elastic_env_async(procs), f"{role}: rendezvous")
        actors = procs.spawn(
            role, Generator, config, str(model_dir), role, seed, self.log_dir, self.store_name, share_with is not None)
        return await self._set_up(RoleMesh(
            role, actors, num_ranks=ranks, tensor_parallel_size=ranks, timeout_s=self.call_timeout_s))

    async def start_store(self) -> None:
        """TorchStore: its volume and its controller, each a process of its own."""
        from torchtitan_rl.weights.store import WeightStore

        store = WeightStore(self.store_name, timeout_s=self.call_timeout_s)
        await self._in_time(store.start(await self._spawn("store", 1)), "store: start")
        self.store = store

    async def _spawn(self, role: str, num_ranks: int):
        bootstrap = None
        if role != "store" and platform.device_type() == "cuda":
            bootstrap = partial(os.environ.update, {"CUDA_VISIBLE_DEVICES": self._next_devices(num_ranks)})
        procs = this_host().spawn_procs(
            per_host={"gpus": num_ranks}, name=role.replace("-", "_"), bootstrap=bootstrap)
        self._meshes.append(procs)
        await self._in_time(procs.initialized, f"{role}: process start")
        return procs

    def _in_time(self, call, what: str):
        return deadline(call, self.start_timeout_s, what)

    def _next_devices(self, num_ranks: int) -> str:
        """GPUs for the next mesh, in the order meshes start; once all are taken, meshes share them from the first."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        if num_ranks > len(devices):
            raise ValueError(f"ranks={num_ranks}: only {len(devices)} GPUs are visible; lower the parallel degrees")
        chosen = [devices[(self._num_placed + rank) % len(devices)] for rank in range(num_ranks)]
        self._num_placed += num_ranks
        return ",".join(chosen)

    async def _set_up(self, mesh: RoleMesh) -> RoleMesh:
        self.pids += await mesh.call_each("where", timeout_s=self.start_timeout_s)
        await mesh.call_each("setup", timeout_s=self.start_timeout_s)
        return mesh

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Stops every mesh; what does not stop in time, or cannot be stopped any more, is killed."""
        async def stop_all() -> None:
            stops = [self.store.stop()] if self.store is not None else []
            results = await asyncio.gather(*stops, return_exceptions=True)
            results += await asyncio.gather(
                *(mesh.stop("run finished") for mesh in reversed(self._meshes)), return_exceptions=True)
            for error in results:  # a mesh that has failed, or never quite started, cannot be stopped in order
                if isinstance(error, Exception):
                    logger.warning("did not stop in order (%s: %s); killing it", type(error).__name__, error)

        try:
            await asyncio.wait_for(stop_all(), timeout_s)
        except TimeoutError:
            logger.warning("meshes did not stop within %g s; killing their processes", timeout_s)
        self._meshes.clear()
        self.kill()

    def kill(self) -> None:
        """The abrupt way, for an interrupted run."""
        for pid in self.pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.pids.clear()

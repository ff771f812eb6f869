"""The generator actor. Endpoints delegate to a `GeneratorRank`, which only the actor's process imports."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl import adapters, platform
from torchtitan_rl.actors.process import heavy_imports, prepare_process
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.record.schedule import Schedules
from torchtitan_rl.types import Request
from torchtitan_rl.weights.pieces import AnyManifest

__all__ = ["Generator"]


class Generator(Actor):
    """One rank of a replica; see `GeneratorRank`. Endpoint calls overlap."""

    Config = GeneratorConfig

    def __init__(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        role: str,
        seed: int,
        log_dir: str | None,
        store_name: str,
        sleeps: bool = False,
        schedules: Schedules | None = None,
    ):
        """`sleeps`: the generator shares devices with trainers; `sleep` frees the devices. `schedules`: what the engine
        records of its schedule, and what it follows; None: neither."""
        self.sleeps, self.schedules = sleeps, schedules
        self.config, self.model, self.role, self.seed = config, model, role, seed
        self.log_dir, self.store_name = log_dir, store_name

    @concurrent_endpoint
    async def setup(self) -> None:
        """Starts the engine, with random weights until the first `load`."""
        rank, world_size = int(os.environ.get("RANK", 0)), self.config.tensor_parallel_degree
        threads = self.config.num_threads or max(1, platform.num_cores() // world_size)
        prepare_process(self.role, rank, world_size, threads, self.log_dir)
        platform.local_device(int(os.environ.get("LOCAL_RANK", rank)))
        adapters.prepare_vllm(eager=self.config.compiles_nothing)
        with heavy_imports():
            from torchtitan_rl.actors.generator_rank import GeneratorRank
            from torchtitan_rl.weights.store import WeightStore

        store = WeightStore(self.store_name)
        if self.config.model_impl != "vllm":  # vLLM's own models cut whole tensors themselves
            store.fetcher.part = rank, world_size
        self.rank = GeneratorRank(
            self.config,
            self.model,
            self.seed,
            rank,
            store,
            sleeps=self.sleeps,
            role=self.role,
            schedules=self.schedules,
        )
        await self.rank.start(threads)

    @concurrent_endpoint
    async def sample(self, ticket: int, requests: list[Request]) -> list[tuple[int, Any]]:
        return await self.rank.sample(ticket, requests)

    @concurrent_endpoint
    async def cancel(self, numbers: list[int]) -> None:
        await self.rank.cancel(numbers)

    @concurrent_endpoint
    async def fetch(self, manifest: AnyManifest, verify: bool) -> ValueError | None:
        return await self.rank.fetch(manifest, verify)

    @concurrent_endpoint
    async def fetch_hf(self, directory: str, version: int) -> None:
        await self.rank.fetch_hf(directory, version)

    @concurrent_endpoint
    async def load(self, version: int) -> float | ValueError:
        return await self.rank.load(version)

    @concurrent_endpoint
    async def load_adapters(self, version: int, slot: int) -> float | ValueError:
        return await self.rank.load_adapters(version, slot)

    @concurrent_endpoint
    async def profile(self, file: str) -> None:
        await self.rank.profile(file)

    @concurrent_endpoint
    async def probe(self) -> None:
        await self.rank.probe()

    @concurrent_endpoint
    async def sleep(self) -> None:
        await self.rank.sleep()

    @concurrent_endpoint
    async def wake(self, part: str) -> None:
        await self.rank.wake(part)

    @concurrent_endpoint
    async def weights(self) -> dict[str, torch.Tensor]:
        return await self.rank.weights()

    @concurrent_endpoint
    async def modules(self) -> list[str]:
        return await self.rank.modules()

    @concurrent_endpoint
    async def pid(self) -> int:
        """The process id."""
        return os.getpid()

    @concurrent_endpoint
    async def abort(self) -> None:
        """Ends this process at once, for a replica out of use: a rank that waits for a dead rank would spin."""
        logging.shutdown()
        os._exit(1)

"""The generator actor: a vLLM engine's doorway. vLLM is imported in the actor's process only."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import torch
from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl import platform
from torchtitan_rl.actors.config import GeneratorConfig
from torchtitan_rl.actors.process import heavy_imports, prepare_process
from torchtitan_rl.types import Completion, Request

__all__ = ["Generator"]

logger = logging.getLogger(__name__)


class Generator(Actor):
    """Owns an engine. Calls overlap: requests of all callers are batched continuously.

    With tensor parallelism only rank 0 is asked to sample or score; `fetch` goes to every rank.
    """

    Config = GeneratorConfig

    def __init__(
        self, config: GeneratorConfig, model_dir: str, role: str, seed: int, log_dir: str | None, store_name: str,
        sleeps: bool = False,
    ):
        """`sleeps`: it shares its devices with trainers, and gives them up when told to."""
        self.sleeps = sleeps
        self.config, self.model_dir, self.role, self.seed = config, model_dir, role, seed
        self.log_dir, self.store_name = log_dir, store_name

    @concurrent_endpoint
    async def setup(self) -> None:
        """Starts the engine; it holds random weights until the first `load`."""
        rank, world_size = int(os.environ.get("RANK", 0)), self.config.tensor_parallel_degree
        threads = self.config.num_threads or max(1, platform.num_cores() // world_size)
        prepare_process(self.role, rank, world_size, threads, self.log_dir)
        platform.local_device(int(os.environ.get("LOCAL_RANK", rank)))
        platform.prepare_vllm(eager=self.config.enforce_eager)
        with heavy_imports():
            from torchtitan_rl.model.vllm_engine import Engine

        self.engine = Engine(self.config, self.model_dir, self.seed, rank, sleeps=self.sleeps)
        self.engine.start()
        await asyncio.wrap_future(self.engine.ready)
        platform.set_threads(threads)  # vLLM's worker sets its own number
        logger.info("engine ready: %s, threads %d", type(self.engine.model).__name__, torch.get_num_threads())

    @concurrent_endpoint
    async def sample(self, requests: list[Request]) -> list[Completion | list[float] | ValueError]:
        """Completions (or log-probabilities, where `params` is None) in the order of the requests.

        A request that is itself at fault gets its ValueError in its place; anything wrong with the engine is raised.
        """
        futures = [asyncio.wrap_future(future) for future in self.engine.submit(requests)]
        answers = await asyncio.gather(*futures, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ValueError):
                raise answer
        return answers

    @concurrent_endpoint
    async def fetch(self, version: int, verify: bool) -> None:
        """Gets a version from the store and checks that it is what this model takes."""
        from torchtitan_rl.weights import packing
        from torchtitan_rl.weights.store import WeightStore

        manifest, payload = await WeightStore(self.store_name).fetch(version, verify=verify)
        difference = packing.explain_difference(manifest.entries, self.engine.held())
        if difference:
            raise RuntimeError(f"policy_version={version}: does not fit this generator: {difference}")
        self.engine.stage(version, packing.read(payload, manifest))

    @concurrent_endpoint
    async def load(self, version: int) -> int:
        """Between two iterations, copies the fetched version into the model and resets the prefix cache."""
        return await asyncio.wrap_future(self.engine.load(version))

    @concurrent_endpoint
    async def sleep(self) -> None:
        """Takes weights and KV cache off the device."""
        await asyncio.wrap_future(self.engine.sleep())

    @concurrent_endpoint
    async def wake(self, part: str) -> None:
        """Brings `"weights"` or `"kv_cache"` back."""
        await asyncio.wrap_future(self.engine.wake(part))

    @concurrent_endpoint
    async def fetch_hf(self, directory: str, version: int) -> None:
        """Stages weights from a Hugging Face directory instead of the store."""
        from safetensors import safe_open

        tensors = {}
        for file in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                tensors.update({name: weights.get_tensor(name) for name in weights.keys()})
        from torchtitan_rl.weights import packing

        state, held = self.engine.from_hf(tensors), self.engine.held()
        offered = {name: packing.Entry(tuple(tensor.shape), held.get(name, ((), tensor.dtype))[1], 0)
                   for name, tensor in state.items()}
        if difference := packing.explain_difference(offered, held):
            raise RuntimeError(f"checkpoint={directory!r}: does not fit this config's model: {difference}")
        self.engine.stage(version, {name: tensor.to(held[name][1]) for name, tensor in state.items()})

    @concurrent_endpoint
    async def weights(self) -> dict[str, torch.Tensor]:
        """This rank's parameters under torchtitan's names, for tests and debugging of small models."""
        return {name: tensor.clone() for name, tensor in self.engine.model.canonical_state().items()}

    @concurrent_endpoint
    async def modules(self) -> list[str]:
        """Qualified class names of the model's modules, for tests."""
        return [f"{type(m).__module__}.{type(m).__qualname__}" for m in self.engine.model.modules()]

    @concurrent_endpoint
    async def where(self) -> int:
        """The process id."""
        return os.getpid()

    @concurrent_endpoint
    async def abort(self) -> None:
        """Ends this process at once, for a replica that is out of use: a rank that waits for a dead one spins."""
        logging.shutdown()
        os._exit(1)

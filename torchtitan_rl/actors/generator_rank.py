"""One generator rank without actors: an engine, and the fetching of weights for the engine."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import torch
from safetensors import safe_open

from torchtitan_rl import platform
from torchtitan_rl.actors.generator_steps import GeneratorSteps
from torchtitan_rl.actors.profiling import profiled
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.engine.engine import Engine
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.difference import explain_difference
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["GeneratorRank"]

logger = logging.getLogger(__name__)


class GeneratorRank(GeneratorSteps):
    """A vLLM engine on a thread. Calls overlap: requests of all callers are batched continuously.

    With tensor parallelism only rank 0 gets requests to sample or score; every rank gets `fetch`.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        model_dir: str,
        seed: int,
        rank: int,
        store: VersionedStore,
        *,
        sleeps: bool = False,
    ):
        """`sleeps`: the engine shares devices with trainers; `sleep` frees the devices."""
        self.store, self._waiting = store, {}
        self.engine = Engine(config, model_dir, seed, rank, sleeps=sleeps)

    async def start(self, num_threads: int) -> None:
        """Builds the engine, with random weights until the first `load`."""
        self.engine.start()
        await asyncio.wrap_future(self.engine.ready)
        platform.set_threads(num_threads)  # vLLM's worker has set another number
        logger.info(
            "engine ready: %s, vLLM's model runner %s, threads %d",
            type(self.engine.model).__name__,
            self.engine.model_runner,
            torch.get_num_threads(),
        )

    async def fetch_hf(self, directory: str, version: int) -> None:
        """Stages weights from a Hugging Face directory. Raises RuntimeError for tensors that do not fit this model."""
        tensors = {}
        for file in sorted(Path(directory).glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                tensors.update({name: weights.get_tensor(name) for name in weights.keys()})
        state, held = self.engine.from_hf(tensors), self.engine.parameter_specs
        offered = {
            name: layout.Entry(tuple(tensor.shape), held.get(name, ((), tensor.dtype))[1], 0)
            for name, tensor in state.items()
        }
        if difference := explain_difference(offered, held):
            raise RuntimeError(f"checkpoint={directory!r}: does not fit this config's model: {difference}")
        self.engine.stage(version, {name: tensor.to(held[name][1]) for name, tensor in state.items()})

    async def profile(self, file: str) -> None:
        """Begins to profile this process; with `file`, ends and writes the trace there."""
        profiled(file)

    async def probe(self) -> None:
        """Returns once the engine's thread has given a sign of life."""
        await asyncio.shield(asyncio.wrap_future(self.engine.probe()))

    async def sleep(self) -> None:
        """Frees weights and KV cache on the device. Raises RuntimeError while requests run."""
        await asyncio.shield(asyncio.wrap_future(self.engine.sleep()))

    async def wake(self, part: str) -> None:
        """Brings `"weights"` or `"kv_cache"` back."""
        await asyncio.shield(asyncio.wrap_future(self.engine.wake(part)))

    async def weights(self) -> dict[str, torch.Tensor]:
        """This rank's parameters under torchtitan's names, in host memory, for tests and debugging of small models."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.engine.model.canonical_state().items()}

    async def modules(self) -> list[str]:
        """Qualified class names of the model's modules, for tests."""
        return [f"{type(m).__module__}.{type(m).__qualname__}" for m in self.engine.model.modules()]

    async def abort(self) -> None:
        """Does nothing: an engine's thread has ended, or hangs and cannot be ended. The actor's endpoint of this name
        ends the process."""

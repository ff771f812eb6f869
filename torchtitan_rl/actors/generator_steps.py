"""What a step asks of one generator rank: completions, and the weights of a version."""

from __future__ import annotations

import asyncio

from torchtitan_rl.model.vllm_engine import Engine
from torchtitan_rl.types import Completion, Request
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.difference import explain_difference
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["GeneratorSteps"]


class GeneratorSteps:
    """The calls of a plain step. `GeneratorRank` builds the engine, and adds the other calls."""

    store: VersionedStore
    engine: Engine

    async def sample(self, requests: list[Request]) -> list[Completion | list[float] | tuple | ValueError]:
        """Completions (or log-probabilities, where `params` is None) in the order of the requests.

        An invalid request gets a ValueError in place of an answer. An error of the engine is raised.
        """
        futures = [asyncio.wrap_future(future) for future in self.engine.submit(requests)]
        answers = await asyncio.gather(*futures, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ValueError):
                raise answer
        return answers  # type: ignore[return-value]  # the loop raised every other type

    async def fetch(self, version: int, verify: bool) -> None:
        """Stages a version from the store. Raises RuntimeError for tensors that do not fit this model."""
        manifest, payload = await self.store.fetch(version, verify=verify)
        if {name: (entry.shape, entry.dtype) for name, entry in manifest.entries.items()} != self.engine.held:
            difference = explain_difference(manifest.entries, self.engine.held)
            raise RuntimeError(f"policy_version={version}: does not fit this generator: {difference}")
        self.engine.stage(version, layout.read(payload, manifest))

    async def load(self, version: int) -> None:
        """Copies the fetched version into the model between two engine steps and resets the prefix cache."""
        await asyncio.wrap_future(self.engine.load(version))

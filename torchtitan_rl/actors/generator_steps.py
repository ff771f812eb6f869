"""What a step asks of one generator rank: completions, and the weights of a version."""

from __future__ import annotations

import asyncio
from typing import Any

from torchtitan_rl.engine.engine_thread import Engine
from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import Request
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.difference import explain_difference
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["GeneratorSteps"]

_GATHER_S = 0.02  # answers of this long travel together


class GeneratorSteps:
    """The calls of a plain step. `GeneratorRank` builds the engine, and adds the other calls."""

    store: VersionedStore
    engine: Engine
    _waiting: dict[int, dict[asyncio.Future, int]]  # ticket -> requests that are not answered, each with its index

    async def sample(self, ticket: int, requests: list[Request]) -> list[tuple[int, Any]]:
        """Admits requests under a ticket, and returns the answers that are there, each with the index of its request;
        waits for the first. Without requests: the next answers of the ticket.

        An answer is a Completion (or log-probabilities, where `params` is None), and a ValueError for an invalid
        request. An error of the engine is raised.
        """
        waiting = self._waiting.pop(ticket, None)
        if waiting is None:
            waiting = dict(zip(map(asyncio.wrap_future, self.engine.submit(requests)), range(len(requests))))
        _, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if left:
            await asyncio.sleep(_GATHER_S)
        done = [future for future in waiting if future.done()]
        answers = [(waiting.pop(future), future.exception() or future.result()) for future in done]
        for _, answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ValueError):
                raise answer
        if waiting:
            self._waiting[ticket] = waiting
        return answers

    async def fetch(self, version: int, verify: bool) -> None:
        """Stages a version from the store. Raises RuntimeError for tensors that do not fit this model."""
        with span("fetch weights", version=version):
            manifest, payload = await self.store.fetch(version, verify=verify)
            if {name: (entry.shape, entry.dtype) for name, entry in manifest.entries.items()} != self.engine.held:
                difference = explain_difference(manifest.entries, self.engine.held)
                raise RuntimeError(f"policy_version={version}: does not fit this generator: {difference}")
            self.engine.stage(version, layout.read(payload, manifest))

    async def load(self, version: int) -> float:
        """Copies the fetched version into the model between two engine steps and resets the prefix cache. Returns the
        seconds from one engine step to the next."""
        return await asyncio.shield(asyncio.wrap_future(self.engine.load(version)))

"""`record.profile`: which steps torch.profiler sees, on which ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_rl.config.record import ProfileConfig
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.types.run_state import RunState

__all__ = ["Profiles"]

logger = logging.getLogger(__name__)


class Profiles:
    """Profiles the chosen ranks from the beginning to the end of each batch that has one of the chosen steps. A rank
    that cannot is reported, and the run goes on."""

    def __init__(
        self,
        config: ProfileConfig,
        steps_per_batch: int,
        state: RunState,
        roles: dict[str, TrainingClient],
        generator: SamplingClient,
        directory: Path,
    ) -> None:
        self._config, self._steps_per_batch, self._state = config, steps_per_batch, state
        self._roles, self._generator, self._directory = roles, generator, directory.absolute()
        self._calls: set[asyncio.Task] = set()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Profiles the block, which trains the next batch, if the batch has a chosen step."""
        first = self._state.step + 1
        if not set(range(first, first + self._steps_per_batch)) & set(self._config.steps):
            yield
            return
        self._call_ranks("")
        try:
            yield
        finally:
            self._call_ranks(f"step-{first}")

    def _call_ranks(self, name: str) -> None:
        """Begins the profile of each chosen rank; with a `name`, ends the profiles and has them written."""
        for rank in self._config.ranks:
            call = asyncio.ensure_future(self._profile(rank, name and str(self._directory / f"{name}.{rank}.json.gz")))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _profile(self, named: str, file: str) -> None:
        role, _, rank = named.rpartition("-")
        client = self._generator if role.startswith("generator-") else self._roles[role]
        try:
            await client.profile(role, int(rank), file)
        except Exception as error:  # a profile is not worth a run
            logger.warning("record.profile.ranks: %s was not profiled: %s", named, error)

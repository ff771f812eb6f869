"""`record.profile`: which steps torch.profiler sees, on which ranks."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from torchtitan_rl.config.recording import ProfileConfig
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.record.recorder import Listener, Span
from torchtitan_rl.types.run_state import RunState

__all__ = ["Profiles"]

logger = logging.getLogger(__name__)


class Profiles(Listener):
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
        self._number = 0
        """The first step of the batch that is being profiled; 0: none is."""
        self._calls: set[asyncio.Task] = set()

    def begin(self, span: Span) -> None:
        first = self._state.step + 1
        batch = range(first, first + self._steps_per_batch)
        if span.name == "step" and self._state.phase == "reinforcement" and set(batch) & set(self._config.steps):
            self._number = first
            self._tell("")

    def end(self, span: Span, failed: bool) -> None:
        if span.name == "step" and self._number:
            self._tell(f"step-{self._number}")
            self._number = 0

    def _tell(self, name: str) -> None:
        for rank in self._config.ranks:
            call = asyncio.ensure_future(self._told(rank, name and str(self._directory / f"{name}.{rank}.json.gz")))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _told(self, named: str, file: str) -> None:
        role, _, rank = named.rpartition("-")
        client = self._generator if role.startswith("generator-") else self._roles[role]
        try:
            await client.profile(role, int(rank), file)
        except Exception as error:  # a profile is not worth a run
            logger.warning("record.profile.ranks: %s was not profiled: %s", named, error)

"""Spare processes for replacements of lost generator replicas, on this machine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from torchtitan_rl.actors.spare import Spare
from torchtitan_rl.dispatch.role_mesh import deadline
from torchtitan_rl.launch.inventory import Place

__all__ = ["Spares"]

logger = logging.getLogger(__name__)


class Spares:
    """Keeps `number` meshes of `ranks` processes each, which have imported what a generator needs."""

    def __init__(
        self,
        number: int,
        ranks: int,
        *,
        eager: bool,
        timeout_s: float,
        spawn: Callable[[str, int, Place], Awaitable[Any]],
        on_pids: Callable[[list[int]], None],
    ) -> None:
        """`spawn(name, ranks, place)` starts processes; `on_pids` is told the ids of processes that are prepared. A
        spare that has not imported, or does not answer, within `timeout_s` is not usable."""
        self.number, self._ranks, self._eager, self._spawn, self._on_pids = number, ranks, eager, spawn, on_pids
        self._timeout_s = timeout_s
        self._preparing: list[asyncio.Task] = []
        self._started = 0

    def fill(self) -> None:
        """Begins to prepare spares until there are `number`. Returns at once."""
        while len(self._preparing) < self.number:
            self._started += 1
            spare = asyncio.ensure_future(self._prepare(f"spare-{self._started}"))
            spare.add_done_callback(_read)
            self._preparing.append(spare)

    async def _prepare(self, name: str) -> tuple[Any, Any]:
        procs = await self._spawn(name, self._ranks, Place(hosts=[0], devices=[""]))
        actors = procs.spawn(name, Spare)
        prepared = await deadline(actors.prepare.call(self._eager), self._timeout_s, f"{name}: prepare")
        self._on_pids([pid for _, pid in prepared])
        return procs, actors

    async def take(self, place: Place) -> Any:
        """Monarch's mesh of a spare's processes, with the devices of `place`; None where no spare is usable. Waits for
        a spare that is being prepared."""
        while self._preparing:
            try:
                procs, actors = await self._preparing.pop(0)
                await deadline(actors.claim.call(place.devices[0]), self._timeout_s, "a spare: claim")
                return procs
            except Exception as error:  # the spare has died or hangs: a process from scratch does as well
                logger.warning("a spare process is not usable (%s: %s)", type(error).__name__, error)
        return None


def _read(spare: asyncio.Task) -> None:
    """A spare that nobody takes may fail when the run ends: asyncio would report its error as one that nobody read."""
    if not spare.cancelled():
        spare.exception()

"""Replacing a lost replica of the generator in place."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

from torchtitan_rl.actors.operations import GeneratorOperations
from torchtitan_rl.dispatch.replica import Replica, ReplicaLost
from torchtitan_rl.dispatch.role_mesh import RoleMesh, WorkerLost, describe

__all__ = ["PlaceGone", "Repair", "TooManyRestarts", "catch_up", "end_processes", "release_versions"]

logger = logging.getLogger(__name__)

_END_WITHIN_S = 90.0  # Monarch may need a minute to notice that a process has ended


class TooManyRestarts(RuntimeError):
    """Replicas were lost more often than `generator.max_replica_restarts` allows."""


class PlaceGone(RuntimeError):
    """The host of a lost replica has left the run: nothing takes the replica's place."""


class Repair:
    """Starts replacements of lost replicas, at most `max_restarts` within `window_s` seconds, over all replicas.

    `start(role)` ends what is left of a replica and starts its replacement on the same devices. The engine of the
    replacement holds no weights yet. Every `probe_every_s` seconds a replica is asked for a sign of life; a replica
    whose engine has given none for `hang_timeout_s` is lost.

    `gone(role)` says why a replica's place is no longer the run's; "" where it is. Such a replica is not replaced, and
    does not count.

    `on_answered` is called once, at the first sign of life after a replica has answered a request: what it prepares for
    later losses delays neither the start of a run nor its first requests.
    """

    def __init__(
        self,
        start: Callable[[str], Awaitable[RoleMesh]],
        *,
        max_restarts: int,
        window_s: float,
        probe_every_s: float,
        hang_timeout_s: float,
        on_answered: Callable[[], None] | None = None,
        gone: Callable[[str], Awaitable[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._gone, self._clock, self._on_answered = start, gone, clock, on_answered
        self.max_restarts, self.window_s = max_restarts, window_s
        self.probe_every_s, self.hang_timeout_s = probe_every_s, hang_timeout_s
        self._restarts: deque[float] = deque()
        self.num_restarts = 0
        """Attempts to replace a replica so far, with those of which the replacement did not start."""

    async def replacement(self, lost: Replica, build: Callable[[RoleMesh], Replica]) -> Replica:
        """A replica with the served version, on the devices of a lost one. `build` makes a replica of a mesh. A
        replacement that does not start is replaced too. Raises TooManyRestarts, and PlaceGone."""
        began, role, reason = self._clock(), lost.mesh.role, lost.lost
        while True:
            if self._gone is not None and (why := await self._gone(role)):
                raise PlaceGone(why)
            self._count(reason)
            replica = None
            try:
                replica = build(await self._start(role))
                await catch_up(replica)
            except Exception as error:
                foreseen = isinstance(error, (RuntimeError, ValueError, ReplicaLost))
                reason = str(error) if foreseen else describe(error)
                event = {"event": "replica_not_replaced", "who": role}
                logger.warning(
                    "%s: its replacement did not start: %s", role, reason, extra=event, exc_info=not foreseen
                )
                if replica is not None:
                    await release_versions(replica)  # it may hold a version that was served when it began to catch up
                continue
            event = {"event": "replica_replaced", "who": role}
            logger.warning("%s: replaced after %.1f s", role, self._clock() - began, extra=event)
            return replica

    async def probe(self, current: Callable[[], Replica], lose: Callable[[Replica, ReplicaLost], None]) -> None:
        """Probes the replica that `current` returns, forever. Calls `lose` when the replica does not answer."""
        while True:
            await asyncio.sleep(self.probe_every_s)
            replica = current()
            if replica.lost is not None:
                continue
            try:
                await replica.mesh.call_leader(GeneratorOperations.probe, timeout_s=self.hang_timeout_s)
            except RuntimeError as error:
                lose(replica, ReplicaLost(str(error)))
                continue
            except Exception:
                logger.exception("%s: could not be asked for a sign of life; it is asked again", replica.mesh.role)
                continue
            if self._on_answered is not None and replica.has_answered:
                prepare, self._on_answered = self._on_answered, None
                prepare()

    def _count(self, reason: str | None) -> None:
        now = self._clock()
        while self._restarts and self._restarts[0] <= now - self.window_s:
            self._restarts.popleft()
        if len(self._restarts) >= self.max_restarts:
            raise TooManyRestarts(
                f"generator.max_replica_restarts={self.max_restarts}: so many replicas were replaced within "
                f"{self.window_s:g} s, and another one is lost ({reason}); look at the logs of the generators"
            )
        self._restarts.append(now)
        self.num_restarts += 1


async def catch_up(replica: Replica) -> None:
    """Loads the served version, and again if another one was published meanwhile."""
    while replica.loaded_version != (served := replica.versions.served):
        try:
            await replica.pull(served)
        except (RuntimeError, ValueError):
            if replica.versions.served == served:  # else the version was deleted when the next one was published
                raise


async def release_versions(replica: Replica) -> None:
    """Gives up the versions that a lost replica holds. What fails is logged: its processes have to end all the same."""
    try:
        await replica.release()
    except Exception:
        logger.warning("%s: the versions that it held are not given up", replica.mesh.role, exc_info=True)


async def end_processes(mesh: RoleMesh) -> None:
    """Ends the processes of a lost replica."""
    await asyncio.gather(*(_end_rank(mesh, rank) for rank in range(mesh.num_ranks)))


async def _end_rank(mesh: RoleMesh, rank: int) -> None:
    try:
        await asyncio.wait_for(mesh.call_rank(rank, GeneratorOperations.abort), _END_WITHIN_S)
    except TimeoutError:
        logger.warning("%s-%d does not end; it keeps its memory until the run ends", mesh.role, rank)
    except WorkerLost:
        pass  # the process has ended

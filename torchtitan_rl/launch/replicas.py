"""Generator replicas that join and leave a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import count, islice

from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.replica import ReplicaLost
from torchtitan_rl.dispatch.role_mesh import RoleMesh

__all__ = ["Replicas"]

logger = logging.getLogger(__name__)


class Replicas:
    """Changes how many replicas a generator has. Requests go on meanwhile.

    A replica that joins starts beside the others, with the threads that theirs have, and loads the served version. One
    that leaves answers its requests first. A request with a seed gets the same tokens from any replica on a CPU, so a
    run without a lag trains on the same batches with any number of replicas.
    """

    def __init__(
        self,
        client: MeshSamplingClient,
        *,
        start: Callable[[str, int | None], Awaitable[RoleMesh]],
        stop: Callable[[str], Awaitable[None]],
    ) -> None:
        """`start(role, host)` starts a replica, whose engine holds no weights yet, on the host of that index (None: on
        any); `stop(role)` ends one that is not used, or that did not start."""
        self._client, self._start, self._stop = client, start, stop
        self._changing, self._joining = asyncio.Lock(), asyncio.Lock()
        self._starting: set[str] = set()
        """The roles of replicas that have not joined yet."""

    @property
    def number(self) -> int:
        """The replicas of the run now, lost ones that are being replaced included."""
        return len(self._client.working())

    async def scale(self, number: int) -> None:
        """Starts or ends replicas until there are `number`; the last ones leave first. Raises ValueError for fewer than
        1, for more than the devices have room for, and where so many are not healthy; RuntimeError where a replica does
        not start: none of the new ones joins then. What has joined or left before an error stays."""
        if number < 1:
            raise ValueError(f"replicas={number}: a run needs a generator; use at least 1")
        async with self._changing:
            if number > self.number:
                await self.add(number - self.number)
            else:
                await self._end_last(self.number - number)

    async def add(self, number: int, *, host: int | None = None) -> None:
        """Starts so many replicas, on the host of that index or on any; they may have the devices of lost ones that
        nothing replaces. Raises as `scale` does."""
        await asyncio.gather(*map(self._stop, self._client.abandoned()))
        taken = self._client.health().keys() | self._starting  # a lost replica keeps its name
        free = (role for index in count() if (role := f"generator-{index}") not in taken)
        roles = list(islice(free, number))
        self._starting.update(roles)
        try:
            with self._client.starting():
                await self._start_and_join(roles, host)
        finally:
            self._starting.difference_update(roles)

    async def _start_and_join(self, roles: list[str], host: int | None) -> None:
        left = list(roles)
        """Those that do not serve yet."""
        try:
            answers = await asyncio.gather(*(self._start(role, host) for role in roles), return_exceptions=True)
            meshes = [answer for answer in answers if not isinstance(answer, BaseException)]
            if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
                kind = ValueError if isinstance(failed[0], ValueError) else RuntimeError
                raise kind(str(failed[0])) from failed[0]
            for role, mesh in zip(roles, meshes, strict=True):
                try:
                    async with self._joining:
                        await self._client.join(mesh)
                except (RuntimeError, ValueError, ReplicaLost) as error:
                    raise RuntimeError(f"{role}: did not load the weights: {error}") from error
                left.remove(role)
                logger.warning("%s has joined", role, extra={"event": "replica_joined", "who": role})
        finally:
            await asyncio.gather(*map(self._stop, left))

    async def _end_last(self, number: int) -> None:
        serving = self._client.serving()
        if number >= len(serving):
            raise ValueError(
                f"replicas={self.number - number}: {number} would leave, and of {self.number} replicas "
                f"{len(serving)} are healthy; ask again once the others are replaced"
            )
        for role in reversed(serving[len(serving) - number :]):
            await self.end(role)

    async def end(self, role: str, hurry: asyncio.Event | None = None) -> None:
        """Ends a replica that serves. It answers its requests first; once `hurry` is set, other replicas do. Raises
        RuntimeError where no other replica serves."""
        await self._client.leave(role, hurry)
        await self._stop(role)
        logger.warning("%s has left", role, extra={"event": "replica_left", "who": role})

    def serving(self) -> list[str]:
        """Roles of the replicas that get requests."""
        return self._client.serving()

    def coming(self) -> list[str]:
        """Roles of the replicas that start, and of lost ones that are being replaced."""
        return [*(role for role in self._client.working() if role not in self._client.serving()), *self._starting]

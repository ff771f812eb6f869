"""Generator replicas that join and leave a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count, islice
from pathlib import Path

from torchtitan_rl.dispatch.replica import ReplicaLost
from torchtitan_rl.dispatch.role_mesh import RoleMesh
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.record import replica_request

__all__ = ["Replicas", "scaled_on_request"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5


class Replicas:
    """Changes how many replicas a generator has. Requests go on meanwhile.

    A replica that joins starts beside the others, with the threads that theirs have, and loads the served version. One
    that leaves answers its requests first. A request with a seed gets the same tokens from any replica on a CPU, so a
    run without a lag trains on the same batches with any number of replicas.
    """

    def __init__(
        self,
        client: SamplingClient,
        *,
        start: Callable[[str], Awaitable[RoleMesh]],
        stop: Callable[[str], Awaitable[None]],
    ) -> None:
        """`start(role)` starts a replica, whose engine holds no weights yet; `stop(role)` ends one that is not used, or
        that did not start."""
        self._client, self._start, self._stop = client, start, stop
        self._changing = asyncio.Lock()

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
                taken = self._client.health()  # a lost replica keeps its name
                free = (role for index in count() if (role := f"generator-{index}") not in taken)
                await self._add(list(islice(free, number - self.number)))
            else:
                await self._remove(self.number - number)

    async def _add(self, roles: list[str]) -> None:
        answers = await asyncio.gather(*map(self._start, roles), return_exceptions=True)
        meshes = [answer for answer in answers if not isinstance(answer, BaseException)]
        if failed := [answer for answer in answers if isinstance(answer, BaseException)]:
            await asyncio.gather(*map(self._stop, roles))
            kind = ValueError if isinstance(failed[0], ValueError) else RuntimeError
            raise kind(str(failed[0])) from failed[0]
        for position, (role, mesh) in enumerate(zip(roles, meshes, strict=True)):
            try:
                await self._client.join(mesh)
            except (RuntimeError, ValueError, ReplicaLost) as error:
                await asyncio.gather(*map(self._stop, roles[position:]))
                raise RuntimeError(f"{role}: did not load the weights: {error}") from error
            logger.warning("%s has joined", role, extra={"event": "replica_joined", "who": role})

    async def _remove(self, number: int) -> None:
        healthy = [role for role, how in self._client.health().items() if how == "healthy"]
        if number >= len(healthy):
            raise ValueError(
                f"replicas={self.number - number}: {number} would leave, and of {self.number} replicas "
                f"{len(healthy)} are healthy; ask again once the others are replaced"
            )
        for role in reversed(healthy[len(healthy) - number :]):
            await self._client.leave(role)
            await self._stop(role)
            logger.warning("%s has left", role, extra={"event": "replica_left", "who": role})


@asynccontextmanager
async def scaled_on_request(replicas: Replicas | None, run: Path) -> AsyncIterator[None]:
    """Does what `torchtitan-rl scale` asks for in the directory of a run, as long as the block runs. None: refuses."""
    replica_request.forget(run)  # of an earlier attempt
    watch = asyncio.ensure_future(_watch(replicas, run))
    try:
        yield
    finally:
        watch.cancel()
        replica_request.forget(run)


async def _watch(replicas: Replicas | None, run: Path) -> None:
    done = ""
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        try:
            request = replica_request.request_in(run)
            if request is not None and request.id != done:
                done = request.id
                problem = await _problem(replicas, request.replicas)
                replica_request.answer(run, request, 0 if replicas is None else replicas.number, problem)
        except (OSError, ValueError) as error:
            logger.warning("a request for another number of replicas was not read: %s", error)
            replica_request.forget(run)


async def _problem(replicas: Replicas | None, number: int) -> str:
    """Changes the number of replicas. Returns why it is not what was asked for; "" where it is."""
    if replicas is None:
        return (
            f"replicas={number}: is fixed in this run, whose roles share devices or whose generator is not a mesh of "
            "its own; begin one with roles.colocation='none' and --backend actors"
        )
    try:
        await replicas.scale(number)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""

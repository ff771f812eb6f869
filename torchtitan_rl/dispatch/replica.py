"""One replica of the generator: the policy version that its engine holds, and when that version may change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import asynccontextmanager, contextmanager

from torchtitan_rl.dispatch.one_version import OneVersion
from torchtitan_rl.dispatch.role_mesh import RoleMesh, WorkerLost
from torchtitan_rl.dispatch.version_holders import VersionHolders
from torchtitan_rl.types import Request

__all__ = ["Replica", "ReplicaLost"]

logger = logging.getLogger(__name__)

_END_WITHIN_S = 90.0  # Monarch may need a minute to notice that a process has ended


class ReplicaLost(Exception):
    """The replica is at fault, not the call. The message is the reason."""


class Replica:
    """One engine and the policy version that it serves.

    While a pinned request is in the engine, no pull changes the weights, and every other pinned request there names the
    same version. The version `versions.served` serves unpinned requests. A pull may change the weights under an
    unpinned request; the completion's `policy_versions` say which version sampled each token.
    """

    def __init__(
        self,
        mesh: RoleMesh,
        versions: VersionHolders | OneVersion,
        verify: bool,
        on_load: Callable[[], None] | None = None,
    ):
        """`on_load` is called after each load of weights. A load empties the engine's caches."""
        self.mesh, self.versions, self.verify, self.on_load = mesh, versions, verify, on_load
        self.held: int | None = None
        self.lost: str | None = None
        """Why the replica is out of use; None while it is healthy."""
        self._naming, self._free = 0, 0
        self._changed = asyncio.Condition()

    async def sample(self, requests: list[Request], version: int | None, timeout_s: float) -> list:
        """One answer per request, in order; a ValueError is the answer to a request at fault. Raises ReplicaLost."""
        async with self._serving(version):
            with _at_fault(RuntimeError):  # a fault of the request would be an answer
                return await self.mesh.call_leader("sample", requests, timeout_s=timeout_s)

    async def pull(self, version: int) -> None:
        """Loads a version out of the store, after all pinned requests have ended. Raises ReplicaLost."""
        async with self._changed:
            await self._until(lambda: self._naming == 0)
            await self._load(version)  # even the version that is held: the trainer may have published it again

    async def load_hf(self, directory: str, version: int) -> None:
        """Loads the weights of a Hugging Face directory, after all pinned requests have ended. Raises ReplicaLost."""
        async with self._changed:
            await self._until(lambda: self._naming == 0)
            await self._fetch("fetch_hf", directory, version)
            await self._activate(version)
            self.held = version

    async def release(self) -> None:
        """Releases the version that the replica holds, and wakes every call that waits for the replica. Call after
        `lost` is set."""
        async with self._changed:
            self._changed.notify_all()
            held, self.held = self.held, None
            if held is not None:
                await self.versions.release(held, self.mesh.role)

    async def end(self) -> None:
        """Ends the replica's processes."""
        await asyncio.gather(*(self._end(rank) for rank in range(self.mesh.num_ranks)))

    async def _end(self, rank: int) -> None:
        try:
            await asyncio.wait_for(self.mesh.call_rank(rank, "abort"), _END_WITHIN_S)
        except TimeoutError:
            logger.warning("%s-%d does not end; it keeps its memory until the run ends", self.mesh.role, rank)
        except WorkerLost:
            pass  # the process has ended

    @asynccontextmanager
    async def _serving(self, version: int | None):
        async with self._changed:
            if version is None:
                await self._until(lambda: self.held == self.versions.served or self._naming == 0)
                if self.held != self.versions.served:
                    await self._load(self.versions.served)
                self._free += 1
            else:
                await self._until(lambda: self.held == version or (self._naming == 0 and self._free == 0))
                if self.held != version:
                    await self._load(version)
                self._naming += 1
        try:
            yield
        finally:
            async with self._changed:
                if version is None:
                    self._free -= 1
                else:
                    self._naming -= 1
                self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._changed.wait_for(lambda: self.lost is not None or condition())
        if self.lost is not None:
            raise ReplicaLost(self.lost)

    async def _load(self, version: int) -> None:
        self.versions.pin(version, self.mesh.role)
        try:
            await self._fetch("fetch", version, self.verify)
            await self._activate(version)
        except BaseException:
            await self.versions.release(version, self.mesh.role)
            raise
        previous, self.held = self.held, version
        if previous is not None:
            await self.versions.release(previous, self.mesh.role)

    async def _fetch(self, endpoint: str, *args) -> None:
        with _at_fault(WorkerLost):  # no other error: damaged or misfit weights would fail on any replica
            await self.mesh.call_all(endpoint, *args)

    async def _activate(self, version: int) -> None:
        with _at_fault(RuntimeError):
            await self.mesh.call_leader("load", version)
        if self.on_load is not None:
            self.on_load()
        self._changed.notify_all()  # requests that wait for a version look again once the lock is free


@contextmanager
def _at_fault(kind: type[Exception]):
    """Turns an error of this kind into ReplicaLost."""
    try:
        yield
    except kind as error:
        raise ReplicaLost(str(error)) from error

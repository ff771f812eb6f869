"""One replica of the generator: which version its engine holds, and who may use it meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import asynccontextmanager

from torchtitan_rl.dispatch.role_mesh import RoleMesh, WorkerLost
from torchtitan_rl.dispatch.versions import OneVersion, PolicyVersions
from torchtitan_rl.types import Request

__all__ = ["Replica", "ReplicaLost"]

logger = logging.getLogger(__name__)

_END_WITHIN_S = 90.0  # Monarch may need a minute to notice


class ReplicaLost(Exception):
    """The replica itself is at fault, whatever it was asked. The message is the reason."""


class Replica:
    """One engine and which version it serves.

    A request that names a version has the engine to itself and others of that version until it is done; a
    request that does not is served by `versions.served`, and a pull may change weights under it (its
    `policy_versions` then say so).
    """

    def __init__(
        self,
        mesh: RoleMesh,
        versions: PolicyVersions | OneVersion,
        verify: bool,
        on_load: Callable[[], None] | None = None,
    ):
        """`on_load` is called after each load of weights, which empties the engine's caches."""
        self.mesh, self.versions, self.verify, self.on_load = mesh, versions, verify, on_load
        self.held: int | None = None
        self.lost: str | None = None
        """Why the replica is out of use; None while it is healthy."""
        self._naming, self._free = 0, 0
        self._changed = asyncio.Condition()

    async def sample(self, requests: list[Request], version: int | None, timeout_s: float) -> list:
        """Answers in order, a ValueError where a request is at fault. Raises ReplicaLost."""
        async with self._serving(version):
            try:
                return await self.mesh.call_leader("sample", requests, timeout_s=timeout_s)
            except RuntimeError as error:  # a request's own fault comes as an answer: this is the engine's
                raise ReplicaLost(str(error)) from error

    async def pull(self, version: int) -> None:
        """Loads a version of the store. Raises ReplicaLost."""
        async with self._changed:
            await self._until(lambda: self._naming == 0)
            await self._load(version)  # even a version it holds: it may have been published again

    async def load_hf(self, directory: str, version: int) -> None:
        """Loads the weights of a Hugging Face directory. Raises ReplicaLost."""
        async with self._changed:
            await self._until(lambda: self._naming == 0)
            await self._fetch("fetch_hf", directory, version)
            await self._activate(version)
            self.held = version

    async def abandon(self) -> None:
        """Once `lost` is set: releases the version it holds, wakes everyone who waits for it, and ends what is left of
        its processes."""
        async with self._changed:
            self._changed.notify_all()
            held, self.held = self.held, None
            if held is not None:
                await self.versions.release(held, self.mesh.role)
        await asyncio.gather(*(self._end(rank) for rank in range(self.mesh.num_ranks)))

    async def _end(self, rank: int) -> None:
        try:
            await asyncio.wait_for(self.mesh.call_rank(rank, "abort"), _END_WITHIN_S)
        except TimeoutError:
            logger.warning("%s-%d does not end; it keeps its memory until the run ends", self.mesh.role, rank)
        except WorkerLost:
            pass  # as it should be

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
        try:
            await self.mesh.call_all(endpoint, *args)
        except WorkerLost as error:  # only this: weights that are damaged or do not fit would be so anywhere
            raise ReplicaLost(str(error)) from error

    async def _activate(self, version: int) -> None:
        try:
            await self.mesh.call_leader("load", version)
        except RuntimeError as error:
            raise ReplicaLost(str(error)) from error
        if self.on_load is not None:
            self.on_load()
        self._changed.notify_all()  # they look once the lock is free

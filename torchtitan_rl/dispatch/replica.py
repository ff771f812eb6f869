"""One replica of the generator: the policy version that its engine holds, and when that version may change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from torchtitan_rl.actors.operations import GeneratorOperations, Operation
from torchtitan_rl.dispatch.one_version import OneVersion
from torchtitan_rl.dispatch.role_mesh import RoleMesh, WorkerLost
from torchtitan_rl.dispatch.version_holders import VersionHolders
from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import Request

__all__ = ["Replica", "ReplicaLost"]


class ReplicaLost(Exception):
    """The replica is at fault, not the call. The message is the reason."""


class Replica:
    """One engine and the policy version that it serves.

    While a pinned request is in the engine, no pull changes the weights, and every other pinned request there names the
    same version. The version `versions.served` serves unpinned requests, and until a pull has fetched it, the version
    before. A pull may change the weights under an unpinned request; the completion's `policy_versions` say which
    version sampled each token.
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
        self._flying: Counter[bool] = Counter()
        """The rounds of requests that are being answered: pinned ones under True."""
        self._pulling: int | None = None
        """The version that a pull is fetching."""
        self._changed = asyncio.Condition()
        self._num_tickets, self.stall_s = 0, 0.0
        """`stall_s`: the seconds for which the engine stood still at the last load of weights."""
        self.unanswered = 0  # requests in the engine

    async def sample(
        self, requests: list[Request], version: int | None, timeout_s: float
    ) -> AsyncIterator[list[tuple[int, Any]]]:
        """Yields answers as they come, each with the index of its request; a ValueError is the answer to a request at
        fault. Raises ReplicaLost, also when `timeout_s` pass without an answer."""
        self._num_tickets = ticket = self._num_tickets + 1
        async with self._serving(version):
            left, self.unanswered = len(requests), self.unanswered + len(requests)
            while left:
                with _at_fault(RuntimeError):  # a fault of the request would be an answer
                    answers = await self.mesh.call_leader(
                        GeneratorOperations.sample, ticket, requests, timeout_s=timeout_s
                    )
                left, self.unanswered, requests = left - len(answers), self.unanswered - len(answers), []
                yield answers

    async def pull(self, version: int) -> None:
        """Fetches a version, while requests go on, and loads it once pinned ones have ended. Raises ReplicaLost."""
        async with self._changed:  # a pinned request may be loading this version: it would take what is fetched here
            self._pulling = version
            self._changed.notify_all()  # the version before serves unpinned requests from now on
        try:
            async with self._fetched(version), self._changed:  # even the held one: it may have been published again
                await self._until(lambda: not self._flying[True])
                previous = await self._switch(version)
        finally:
            self._pulling = None
            async with self._changed:
                self._changed.notify_all()
        await self._release(previous)

    async def load_hf(self, directory: str, version: int) -> None:
        """Loads the weights of a Hugging Face directory, after all pinned requests have ended. Raises ReplicaLost."""
        async with self._changed:
            await self._until(lambda: not self._flying[True])
            await self._fetch(GeneratorOperations.fetch_hf, directory, version)
            await self._switch(version)

    async def release(self) -> None:
        """Releases the version that the replica holds, and wakes every call that waits for the replica. Call after
        `lost` is set."""
        async with self._changed:
            self._changed.notify_all()
            held, self.held = self.held, None
            await self._release(held)

    @asynccontextmanager
    async def _serving(self, version: int | None):
        pinned = version is not None
        async with self._changed:
            await self._until(lambda: self._serves(version) or self._may_load(version))
            if not self._serves(version):
                await self._load(version if pinned else self.versions.served)
            self._flying[pinned] += 1
        try:
            yield
        finally:
            async with self._changed:
                self._flying[pinned] -= 1
                if not self._flying[pinned]:  # what waits, waits for none to be left
                    self._changed.notify_all()

    def _serves(self, version: int | None) -> bool:
        """Whether a request that names a version, or None, may begin with the weights that are held."""
        if version is None:
            before = self.versions.publications[-2:-1] if self._pulling == self.versions.served else []
            return self.held in (self.versions.served, *before)  # and no older one, which a pinned request has loaded
        return self.held == version

    def _may_load(self, version: int | None) -> bool:
        """Whether a request may load its version: requests under way allow it, and no pull is about to load it."""
        in_the_way = (True,) if version is None else (True, False)
        pulled = self._pulling == (self.versions.served if version is None else version)
        return not (pulled or any(self._flying[kind] for kind in in_the_way))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self.lost is None and not condition():
            with span("wait for pinned requests"):
                await self._changed.wait()
        if self.lost is not None:
            raise ReplicaLost(self.lost)

    async def _load(self, version: int) -> None:
        async with self._fetched(version):
            previous = await self._switch(version)
        await self._release(previous)

    @asynccontextmanager
    async def _fetched(self, version: int):
        """Pins and fetches a version, which the block loads; releases the version where that fails."""
        self.versions.pin(version, self.mesh.role)
        try:
            await self._fetch(GeneratorOperations.fetch, version, self.verify)
            yield
        except BaseException:
            await self.versions.release(version, self.mesh.role)
            raise

    async def _release(self, version: int | None) -> None:
        if version is not None:
            await self.versions.release(version, self.mesh.role)

    async def _fetch(self, operation: Operation, *args) -> None:
        with _at_fault(WorkerLost):  # no other error: damaged or misfit weights would fail on any replica
            await self.mesh.call_all(operation, *args)

    async def _switch(self, version: int) -> int | None:
        """Loads a fetched version into the engine. Returns the version that was held before."""
        with _at_fault(RuntimeError):
            self.stall_s = await self.mesh.call_leader(GeneratorOperations.load, version)
        if self.on_load is not None:
            self.on_load()
        self._changed.notify_all()  # requests that wait for a version look again once the lock is free
        previous, self.held = self.held, version
        return previous


@contextmanager
def _at_fault(kind: type[Exception]):
    """Turns an error of this kind into ReplicaLost."""
    try:
        yield
    except kind as error:
        raise ReplicaLost(str(error)) from error

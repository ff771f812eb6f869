"""One replica of the generator: the policy version that its engine holds, and when that version may change."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import Enum, auto
from typing import Any

from torchtitan_rl.actors.operations import GeneratorOperations, Operation
from torchtitan_rl.dispatch.resident_adapters import ResidentAdapters
from torchtitan_rl.dispatch.role_mesh import RoleMesh, WorkerLost
from torchtitan_rl.dispatch.versions import ServedVersions
from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import WITHOUT_ADAPTERS, Request

__all__ = ["Membership", "Replica", "ReplicaLost", "VersionRefused"]


class ReplicaLost(Exception):
    """The replica is at fault, not the call. The message is the reason."""


class VersionRefused(ValueError):
    """The version is at fault: its tensors do not fit, or the engine cannot load them. The replica holds the version
    that it held before, and goes on."""


class Membership(Enum):
    """Whether a replica belongs to the client that routes requests to it. A lost replica is a member until it has
    left."""

    MEMBER = auto()
    LEAVING = auto()
    """It gets no further request, and leaves once it has answered those that it has."""
    LEFT = auto()
    """The next replica that joins takes its index."""


class Replica:
    """One engine and the policy version that it serves.

    While a pinned request is in the engine, no pull changes the weights, and every other pinned request there names the
    same version. The version `versions.served` serves unpinned requests, and until a pull has fetched it, the version
    before. A pull may change the weights under an unpinned request; the completion's `policy_versions` say which
    version sampled each token.

    An engine with slots for adapters serves any versions side by side. A request keeps the adapters that it began with,
    and waits only while every slot is held by other requests.
    """

    def __init__(
        self,
        mesh: RoleMesh,
        versions: ServedVersions,
        verify: bool,
        on_load: Callable[[], None] | None = None,
        num_adapter_slots: int = 0,
        *,
        follows: bool = False,
    ):
        """`on_load` is called after each load of weights. A load empties the engine's caches. `num_adapter_slots`: of
        the engine; 0: it holds one version. `follows`: the engine follows a schedule, and puts requests and loads in
        the recorded order however early they come."""
        self._follows = follows
        self._adapters = ResidentAdapters(num_adapter_slots) if num_adapter_slots else None
        self.mesh, self.versions, self.verify, self.on_load = mesh, versions, verify, on_load
        self.loaded_version: int | None = None
        """The policy version that the engine holds; None before the first load, and once the replica is lost."""
        self.lost: str | None = None
        """Why the replica is out of use; None while it is healthy."""
        self.membership = Membership.MEMBER
        self.is_being_replaced = False
        """Whether the replica is lost and another is being started in its place."""
        self._in_flight: Counter[str] = Counter()
        """The calls of `sample` under way, those for `"pinned"` requests and those for `"unpinned"` ones."""
        self._pulling: int | None = None
        """The version that a pull is fetching."""
        self._pulled: int | None = None
        """The version that the last pull has loaded; None once a pull has failed."""
        self._releasing: asyncio.Future[None] | None = None
        """The release of the version before, after a pull: nobody waits for it but the next pull."""
        self._changed = asyncio.Condition()
        self._num_tickets = 0
        self.stall_s = 0.0
        """The seconds for which the engine stood still at the last load of weights."""
        self.unanswered = 0  # requests in the engine
        self.has_answered = False
        """Whether the replica has answered a request."""

    async def sample(
        self, requests: list[Request], version: int | None, timeout_s: float
    ) -> AsyncIterator[list[tuple[int, Any]]]:
        """Yields answers as they come, each with the index of its request; a ValueError is the answer to a request at
        fault, None to one that was cancelled. Raises ReplicaLost, also when `timeout_s` pass without an answer, and
        VersionRefused."""
        self._num_tickets = ticket = self._num_tickets + 1
        async with self._serving(version) if self._adapters is None else self._holding(version) as adapter:
            for request in requests:
                request.adapter = adapter
            num_left = len(requests)
            self.unanswered += num_left
            while num_left:
                with _as_replica_lost(RuntimeError):  # a fault of the request would be an answer
                    answers = await self.mesh.call_leader(
                        GeneratorOperations.sample, ticket, requests, timeout_s=timeout_s
                    )
                num_left -= len(answers)
                self.unanswered -= len(answers)
                requests = []  # further calls ask for the next answers of the ticket
                self.has_answered = True
                yield answers

    async def cancel(self, numbers: list[int]) -> None:
        """Takes requests out of the engine whose callers have gone: their answers, None, come at once. One that waits
        for its version is not in the engine yet, and stays."""
        with suppress(RuntimeError):  # an engine that is lost has none of them, and the calls that wait for it say so
            await self.mesh.call_leader(GeneratorOperations.cancel, numbers)

    async def pull(self, version: int) -> None:
        """Fetches a version, while requests go on, and loads it once pinned ones have ended. Adapters are fetched once
        a slot is free for them, and no request begins until they are loaded: they are small. Raises ReplicaLost, and
        VersionRefused."""
        if (releasing := self._releasing) is not None:
            try:
                await asyncio.shield(releasing)  # it goes on where the pull is cancelled
            finally:
                if releasing.done():
                    self._releasing = None
        if self._adapters is not None:
            previous = await self._pull_adapters(version, self._adapters)
            self._releasing = asyncio.ensure_future(self._release(previous))
            return
        async with self._changed:  # a pinned request may be loading this version: it would take what is fetched here
            self._pulling = version
            self._changed.notify_all()  # the version before serves unpinned requests from now on
        try:
            async with self._fetched(version), self._changed:  # even the held one: it may have been published again
                await self._until(lambda: not self._in_flight["pinned"])
                previous = await self._switch(version)
                self._pulled = version
        except BaseException:
            self._pulled = None
            raise
        finally:
            self._pulling = None
            async with self._changed:
                self._changed.notify_all()
        self._releasing = asyncio.ensure_future(self._release(previous))

    async def load_hf(self, directory: str, version: int) -> None:
        """Loads the weights of a Hugging Face directory, after all pinned requests have ended. Raises ReplicaLost."""
        async with self._changed:
            await self._until(lambda: not self._in_flight["pinned"])
            await self._fetch(GeneratorOperations.fetch_hf, directory, version)
            await self._switch(version)

    def close(self) -> None:
        """Gives up the release of the version before, if it goes on: the store ends too."""
        releasing = self._releasing
        if releasing is not None and not releasing.cancel() and not releasing.cancelled():
            releasing.exception()  # read: where the trainer has died, the call that waited for it has said so

    async def release(self) -> None:
        """Releases the version that the replica holds, and wakes every call that waits for the replica. Call after
        `lost` is set."""
        async with self._changed:
            self._changed.notify_all()
            loaded, self.loaded_version = self.loaded_version, None
            await self._release(loaded)

    # An engine with slots for adapters.

    @asynccontextmanager
    async def _holding(self, version: int | None) -> AsyncIterator[int]:
        """Holds the adapters of a version (None: the loaded one) in the engine while the block runs; loads them first
        where they are not there. Gives the version. The base, which came with the first adapters, needs no slot."""
        assert self._adapters is not None
        if version == WITHOUT_ADAPTERS:
            async with self._changed:
                await self._until(lambda: self.loaded_version is not None)
            yield version
            return
        async with self._changed:
            if version is None:
                version = self.versions.served if self.loaded_version is None else self.loaded_version
            await self._until(lambda: version in self._adapters or self._adapters.has_room(version))
            if version not in self._adapters:
                async with self._fetched(version):
                    await self._into_slot(version, self._adapters)
                await self._release(version)  # the engine has a copy of its own
            self._adapters.hold(version)
        try:
            yield version
        finally:
            async with self._changed:
                self._adapters.release(version)
                self._changed.notify_all()

    async def _pull_adapters(self, version: int, adapters: ResidentAdapters) -> int | None:
        """Loads the adapters of a version for unpinned requests. Returns the version that served those before."""
        async with self._changed:
            await self._until(lambda: adapters.has_room(version))
            async with self._fetched(version):  # even those that are there: they may be others by now
                await self._into_slot(version, adapters)
            adapters.hold(version)
            previous, self.loaded_version = self.loaded_version, version
            if previous is not None:
                adapters.release(previous)
            if self.on_load is not None:
                self.on_load()
            self._changed.notify_all()
        return previous

    async def _into_slot(self, version: int, adapters: ResidentAdapters) -> None:
        """Loads fetched adapters into a slot; there is room. Raises VersionRefused."""
        slot = adapters.take_slot(version)
        try:
            with _as_replica_lost(RuntimeError):
                answer = await self.mesh.call_leader(GeneratorOperations.load_adapters, version, slot)
            if isinstance(answer, ValueError):
                raise VersionRefused(str(answer))
        except BaseException:
            adapters.give_back(version, slot)
            raise
        adapters.put(version, slot)
        self.stall_s = answer

    # An engine that holds one version.

    @asynccontextmanager
    async def _serving(self, version: int | None):
        if self._follows:  # a load that is under way may be due after this request, and waits for it in the engine
            if self.lost is not None:
                raise ReplicaLost(self.lost)
            yield
            return
        kind = "unpinned" if version is None else "pinned"
        async with self._changed:
            await self._until(lambda: self._serves(version) or self._may_load(version))
            if not self._serves(version):
                await self._load(self.versions.served if version is None else version)
            self._in_flight[kind] += 1
        try:
            yield
        finally:
            async with self._changed:
                self._in_flight[kind] -= 1
                if not self._in_flight[kind]:
                    self._changed.notify_all()  # waiters wait for the last request of a kind

    def _serves(self, version: int | None) -> bool:
        """Whether a request for `version` (None: any) may begin with the weights that the replica has now."""
        if version is None:
            # `MeshSamplingClient.pull` names a version as served before any replica has it. Until this one has, what it
            # pulled last answers; an older version does not, which a pinned request may have loaded.
            return self.loaded_version is not None and self.loaded_version in (self.versions.served, self._pulled)
        return self.loaded_version == version

    def _may_load(self, version: int | None) -> bool:
        """Whether a request may load its version: requests under way allow it, and no pull is about to load it."""
        pulled = self._pulling == (self.versions.served if version is None else version)
        blocked = self._in_flight["pinned"] or (version is not None and self._in_flight["unpinned"])
        return not (pulled or blocked)

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
            await self._fetch(GeneratorOperations.fetch, self.versions.manifest(version), self.verify)
            yield
        except BaseException:
            await self.versions.release(version, self.mesh.role)
            raise

    async def _release(self, version: int | None) -> None:
        if version is not None:
            await self.versions.release(version, self.mesh.role)

    async def _fetch(self, operation: Operation, *args) -> None:
        with _as_replica_lost(WorkerLost):  # no other error: damaged weights would fail on any replica
            refusal = await self.mesh.call_all(operation, *args)
        if refusal is not None:
            raise VersionRefused(str(refusal))

    async def _switch(self, version: int) -> int | None:
        """Loads a fetched version into the engine. Returns the version that was held before. Raises VersionRefused once
        the engine holds the version before again."""
        if (refusal := await self._copy(version)) is not None:
            await self._go_back(refusal)
            raise VersionRefused(str(refusal))
        previous, self.loaded_version = self.loaded_version, version
        return previous

    async def _copy(self, version: int) -> ValueError | None:
        """Loads a fetched version into the engine. Returns why the engine cannot: it stands still until a later load
        succeeds."""
        with _as_replica_lost(RuntimeError):
            answer = await self.mesh.call_leader(GeneratorOperations.load, version)
        if isinstance(answer, ValueError):
            return answer
        self.stall_s = answer
        if self.on_load is not None:
            self.on_load()
        self._changed.notify_all()  # requests that wait for a version look again once the lock is free
        return None

    async def _go_back(self, refusal: ValueError) -> None:
        """Loads the held version once more, which is pinned for this replica. Raises ReplicaLost where that
        fails."""
        if self.loaded_version is None:
            return  # no request is in an engine without weights
        try:
            await self._fetch(GeneratorOperations.fetch, self.versions.manifest(self.loaded_version), self.verify)
            second_refusal = await self._copy(self.loaded_version)
        except (RuntimeError, ValueError) as error:
            raise ReplicaLost(f"{refusal}; version {self.loaded_version} did not come back: {error}") from error
        if second_refusal is not None:
            raise ReplicaLost(f"{refusal}; version {self.loaded_version} did not come back: {second_refusal}")


@contextmanager
def _as_replica_lost(kind: type[Exception]):
    """Turns an error of this kind into ReplicaLost."""
    try:
        yield
    except kind as error:
        raise ReplicaLost(str(error)) from error

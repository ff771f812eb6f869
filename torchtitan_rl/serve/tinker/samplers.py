"""Which weights can be sampled from: versions in the store, a bounded number of them, the others on disk.

The generators serve requests of one version at a time. Versions that are asked for alternate: each gets the generators
for a turn, then the version that has waited longest.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.serve.tinker.faults import user
from torchtitan_rl.serve.tinker.saved_states import require_intact
from torchtitan_rl.weights.checkpoint import checksums, checksums_file

__all__ = ["Turns", "Versions"]

_HOLDER = "sampler"


class Turns:
    """Lets requests of one version in at a time, for about `turn_s` seconds while others wait."""

    def __init__(self, *, turn_s: float = 0.5) -> None:
        self._turn_s = turn_s
        self.version: int | None = None
        """The version whose turn it is."""
        self._inside = 0
        self._began = 0.0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.num_turns = 0
        """Turns so far: how often the generators changed their weights."""

    @asynccontextmanager
    async def of(self, version: int) -> AsyncIterator[None]:
        """Enters when it is the version's turn."""
        loop = asyncio.get_running_loop()
        if self._inside == 0 and not self._waiting:
            self._begin(version)
        over = bool(self._waiting) and loop.time() - self._began > self._turn_s
        if version == self.version and not over:
            self._inside += 1
        else:
            entered: asyncio.Future[None] = loop.create_future()
            self._waiting.append((version, entered))
            try:
                await entered
            except asyncio.CancelledError:
                if entered.done() and not entered.cancelled():  # let in, and cancelled before it went on
                    self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    def _begin(self, version: int) -> None:
        if version != self.version:
            self.version, self.num_turns = version, self.num_turns + 1
        self._began = asyncio.get_running_loop().time()

    def _leave(self) -> None:
        self._inside -= 1
        if self._inside:
            return
        self._waiting = deque(entry for entry in self._waiting if not entry[1].done())  # the others were cancelled
        if not self._waiting:
            return
        self._begin(version := self._waiting[0][0])
        for waits, entered in self._waiting:
            if waits == version:
                self._inside += 1
                entered.set_result(None)
        self._waiting = deque(entry for entry in self._waiting if entry[0] != version)


@dataclass(slots=True)
class _Entry:
    file: Path | None
    """Where the version's weights are on disk; None: in the store alone."""
    spilled: bool = False
    """Whether the file is the server's own, not a checkpoint's."""
    checksum: list | None = None
    """Of the server's own file: bytes and xxh3."""
    saved: str = ""
    """What the checkpoint's own record said of its files when the version was named. A client may save other weights in
    its place."""
    users: int = 0
    publishers: int = 0
    """Callers of `publish` that have not called `leave` yet."""
    samplers: int = 0
    """Sampling sessions that name the version."""


class Versions:
    """The versions that samplers need. At most `max_published` of those that nobody uses now are in the store; one that
    is pushed out is written to `spool` first, and published again when a request needs it. Beyond `max_spooled` files
    those used least recently are dropped."""

    def __init__(self, versions: PolicyVersions, *, max_published: int, max_spooled: int, spool: Path) -> None:
        self._versions, self._max_published, self._spool = versions, max_published, spool
        self._max_spooled = max_spooled
        self._entries: dict[int, _Entry] = {}
        self._published: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._lock = asyncio.Lock()
        self._num_publishing = 0
        shutil.rmtree(spool, ignore_errors=True)  # of an earlier server, whose versions nobody can name
        spool.mkdir(parents=True)

    def __contains__(self, version: int) -> bool:
        return version in self._entries

    async def publish(self) -> int:
        """Publishes the trainer's model as it is, and keeps the version until `leave`. Submits to the trainer before it
        first waits."""
        self._num_publishing += 1
        try:
            version = await self._versions.publish_for(_HOLDER)
        finally:
            self._num_publishing -= 1
        if version in self._entries and version in self._published:
            await self._versions.release(version, _HOLDER)  # the model has not changed since
        self._entries.setdefault(version, _Entry(None)).publishers += 1
        self._published[version] = None
        self._published.move_to_end(version)
        try:
            await self._make_room()
        except BaseException:  # a full disk
            self.leave(version)
            raise
        return version

    def leave(self, version: int) -> None:
        """Ends what `publish` began."""
        self._entries[version].publishers -= 1

    def add_sampler(self, version: int) -> None:
        """A sampling session names the version from now on. Nothing where the version was dropped."""
        if version in self._entries:
            self._entries[version].samplers += 1

    def remove_sampler(self, version: int) -> None:
        """A sampling session has ended."""
        if version in self._entries:
            self._entries[version].samplers -= 1

    def keep(self, version: int) -> None:
        """Adds a version that is published, and stays so."""
        self._versions.pin(version, _HOLDER)
        self._entries[version], self._published[version] = _Entry(None, users=1), None

    async def save(self, version: int, file: Path) -> None:
        """Writes a version's weights."""
        async with self.published(version):
            await self._versions.save(version, file)

    def register(self, version: int, file: Path) -> None:
        """Adds a version that is on disk."""
        self._entries.setdefault(version, _Entry(file, saved=_record(file)))

    @asynccontextmanager
    async def published(self, version: int) -> AsyncIterator[None]:
        """Keeps a version in the store for as long as the block runs."""
        if (entry := self._entries.get(version)) is None:
            raise user(
                f"version={version}: was dropped: many newer ones have no name; save weights with a name to keep them"
            )
        entry.users += 1
        try:
            if version not in self._published:
                async with self._lock:
                    if version not in self._published:
                        if entry.file is None or not entry.file.exists():
                            raise user(f"version={version}: its checkpoint was deleted; sample from another one")
                        await self._require_intact(version, entry)
                        await self._versions.publish_file(version, entry.file, _HOLDER)
                        if version in self._published:  # by `publish`, meanwhile
                            await self._versions.release(version, _HOLDER)
                        self._published[version] = None
                await self._make_room()
            self._published.move_to_end(version)
            self._entries[version] = self._entries.pop(version)  # used last
            yield
        finally:
            entry.users -= 1

    async def _require_intact(self, version: int, entry: _Entry) -> None:
        """Raises Fault where a version's file is not what was written."""
        if not entry.spilled:
            if _record(entry.file) != entry.saved:
                raise user(
                    f"version={version}: other weights were saved in place of its checkpoint; create a sampling client "
                    "again, from the saved path"
                )
            await require_intact(entry.file.parent)
        elif await asyncio.to_thread(_checksum, entry.file) != entry.checksum:
            raise user(f"version={version}: its file is damaged; save the weights again")

    async def forget(self, version: int) -> None:
        """Drops a version, unless a request uses it or a sampling session names it. While something is published the
        version stays, as it may be published again: `_make_room` writes it to disk later."""
        async with self._lock:
            entry = self._entries.get(version)
            if entry is None or entry.users or entry.publishers or entry.samplers or self._num_publishing:
                return
            del self._entries[version]
            if version in self._published:
                del self._published[version]
                await self._versions.release(version, _HOLDER)
            if entry.spilled and entry.file is not None:
                entry.file.unlink(missing_ok=True)

    async def _make_room(self) -> None:
        async with self._lock:
            if self._num_publishing:  # it may publish a version that would be released here, and makes room afterwards
                return
            idle = [version for version in self._published if not self._entries[version].users]
            for version in idle[: max(0, len(idle) - self._max_published)]:
                entry = self._entries[version]
                if entry.file is None:
                    file = self._spool / f"{version}.safetensors"
                    await self._versions.save(version, file)
                    entry.checksum = await asyncio.to_thread(_checksum, file)
                    entry.file, entry.spilled = file, True  # not before: a file that was not written holds nothing
                used = entry.users or entry.publishers or self._num_publishing
                if not used and version in self._published:
                    del self._published[version]
                    await self._versions.release(version, _HOLDER)
            spooled = [v for v, e in self._entries.items() if e.spilled and not e.users and v not in self._published]
            for version in spooled[: max(0, len(spooled) - self._max_spooled)]:
                self._entries.pop(version).file.unlink(missing_ok=True)


def _record(file: Path) -> str:
    """The record of checksums beside a checkpoint's file; empty where an older server wrote none."""
    record = checksums_file(file.parent)
    return record.read_text() if record.exists() else ""


def _checksum(file: Path) -> list:
    """Bytes and xxh3 of a file."""
    return checksums(file.parent, [file])[file.name]

"""Which versions of adapters an engine holds, in which slots."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict

__all__ = ["ResidentAdapters"]


class ResidentAdapters:
    """The slots of one engine. A version that somebody holds keeps its slot; of the others, the one that was held least
    recently gives its slot away first."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(reversed(range(num_slots)))
        self._slots: OrderedDict[int, int] = OrderedDict()
        """Version -> slot; the version that was held last is the last one."""
        self._holders: Counter[int] = Counter()
        self._emptied: defaultdict[int, list[int]] = defaultdict(list)
        """Version -> slots that it gave up while it was held."""

    def __contains__(self, version: int) -> bool:
        return version in self._slots

    def has_room(self, version: int) -> bool:
        """Whether adapters of `version` may be loaded now: not while every slot is held for other versions."""
        return version in self._slots or bool(self._free) or self._idle() is not None

    def take_slot(self, version: int) -> int:
        """The slot into which adapters of `version` are loaded: the version's own, or else an empty one, or that of a
        version that nobody holds, which counts as evicted at once. Call where `has_room`."""
        if version in self._slots:
            return self._slots.pop(version)
        return self._free.pop() if self._free else self._slots.pop(self._idle())

    def _idle(self) -> int | None:
        return next((version for version in self._slots if not self._holders[version]), None)

    def put(self, version: int, slot: int) -> None:
        """The engine has loaded the version into a slot that `take_slot` gave."""
        self._slots[version] = slot

    def give_back(self, version: int, slot: int) -> None:
        """The engine has loaded nothing into a slot that `take_slot` gave for `version`. Where somebody still holds the
        version, its requests are in that slot: it is empty once they have ended."""
        (self._emptied[version] if self._holders[version] else self._free).append(slot)

    def hold(self, version: int) -> None:
        """Keeps a resident version until `release`."""
        self._holders[version] += 1
        self._slots.move_to_end(version)

    def release(self, version: int) -> None:
        """Ends one `hold`."""
        self._holders[version] -= 1
        if not self._holders[version]:
            del self._holders[version]
            self._free += self._emptied.pop(version, [])

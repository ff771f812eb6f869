"""Which host has the most room for one more sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SandboxRoom", "roomiest"]


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxRoom:
    """What a host has and what its sandboxes may use. Example: `SandboxRoom(num_cores=64, free_bytes=2**36)`."""

    num_cores: int
    free_bytes: int
    """Memory that nobody uses at present."""
    num_running: int = 0
    allowed_bytes: int = 0
    """Memory that the running sandboxes may use together."""

    def load(self, memory_bytes: int) -> float:
        """The load with one more sandbox that may use `memory_bytes`: sandboxes per core, or the part of the free
        memory that they may use, whichever is more. Memory that running ones use already counts twice, which favours
        hosts that have memory."""
        memory_load = (self.allowed_bytes + memory_bytes) / max(1, self.free_bytes)
        return max((self.num_running + 1) / self.num_cores, memory_load)


def roomiest(rooms: Sequence[SandboxRoom | None], memory_bytes: int) -> int:
    """The index of the host whose load is least with one more sandbox, the first of equals. None: a host that is lost.
    Raises ValueError where all are lost."""
    there = [index for index, room in enumerate(rooms) if room is not None]
    if not there:
        raise ValueError(f"rooms={list(rooms)}: every host is lost; give one that is not")
    return min(there, key=lambda index: rooms[index].load(memory_bytes))

"""The spans of a run, of all its processes, on the controller's clock."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.record.json_lines import parsed

__all__ = ["TimelineSpan", "Process", "Timeline", "CONTROLLER"]

CONTROLLER = "controller"
_ANSWERS = {"fetch weights": "fetch", "load weights": "load"}
"""Work of a generator -> the call that it answers. The work of a trainer is named after its role and the call."""


@dataclass(slots=True)
class TimelineSpan:
    """One span: a phase, a piece of work or a wait. Times are nanoseconds since 1970, on the controller's clock."""

    name: str
    kind: str
    start: int
    end: int
    thread: str = ""
    id: int = 0
    parent: int = 0
    """The `id` of the phase that it is part of; 0: of none."""
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Process:
    """What one process recorded."""

    name: str
    """`controller`, `reward`, or a role and a rank, such as `policy-0` or `generator-1-0`."""
    pid: int
    boot: str
    """Names the start of the host's system: processes of one start have one clock."""
    clock: int
    """The same for the processes of one attempt at a run: what their controller's clock began with."""
    pieces: list[TimelineSpan] = field(default_factory=list)
    dropped: int = 0
    """Spans that could not be written."""
    moved_ns: int = 0
    """By how much the process's own clock was ahead of the controller's."""

    @property
    def role(self) -> str:
        return self.name.rpartition("-")[0] or self.name

    def move(self, ahead_ns: int) -> None:
        """Takes `ahead_ns` off all times."""
        self.moved_ns += ahead_ns
        for piece in self.pieces:
            piece.start, piece.end = piece.start - ahead_ns, piece.end - ahead_ns


@dataclass(slots=True)
class Timeline:
    """The processes of a run. A resumed run has the processes of every attempt."""

    processes: list[Process]

    @classmethod
    def read(cls, directory: Path, *, window: tuple[int, int] | None = None, phases_only: bool = False) -> Timeline:
        """The files below `directory`. A last line that is half written, or a file without a header, is left out.

        Of a long run most spans need not be read: `window` leaves out what ends before or starts after these times,
        and `phases_only` everything but phases. Raises ValueError where no process recorded anything.
        """
        kept = _Kept(window, phases_only)
        processes = [
            process for file in sorted(directory.glob("*.jsonl")) if (process := _process(file, kept)) is not None
        ]
        if not any(process.name == CONTROLLER for process in processes):
            raise ValueError(
                f"run={str(directory.parent)!r}: has no timeline; train with --record.timeline True to record one"
            )
        timeline = cls(sorted(processes, key=lambda process: (process.name != CONTROLLER, process.name, process.pid)))
        controllers = {process.clock: process for process in timeline.controllers}
        elsewhere = [p for p in processes if p.clock in controllers and p.boot != controllers[p.clock].boot]
        if elsewhere and window is not None:  # clocks are compared by all calls of a run
            return cls.read(directory)
        for process in elsewhere:
            process.move(_ahead(process, controllers[process.clock]))
        return timeline

    @property
    def controllers(self) -> list[Process]:
        return [process for process in self.processes if process.name == CONTROLLER]


def _ahead(process: Process, controller: Process) -> int:
    """Nanoseconds by which a process's clock is ahead, in the middle of what its calls allow; 0 without a call. No call
    begins before it is sent, and no answer comes before the call has ended."""
    least, most = [], []
    waits: dict[str, list[TimelineSpan]] = defaultdict(list)
    for piece in controller.pieces:
        if piece.kind == "wait":
            waits[piece.name].append(piece)
    answered: dict[str, list[TimelineSpan]] = defaultdict(list)
    for piece in process.pieces:
        call_name = f"{process.role}.{_ANSWERS[piece.name]}" if piece.name in _ANSWERS else piece.name
        answered[f"wait for {call_name}"].append(piece)
    for name, pieces in answered.items():
        calls = sorted(waits.get(name, ()), key=lambda piece: piece.start)
        if abs(len(calls) - len(pieces)) > 1:  # one may be going on; with more, which belongs to which is not known
            continue
        for call, piece in zip(calls, sorted(pieces, key=lambda piece: piece.start)):
            most.append(piece.start - call.start)
            least.append(piece.end - call.end)
    return (min(most) + max(least)) // 2 if most else 0


@dataclass(slots=True)
class _Kept:
    """Which lines of a file are read. Looks at the text of a line: parsing it would take ten times as long. JSON may
    or may not have a space after a comma or a colon."""

    window: tuple[int, int] | None
    phases_only: bool
    boot: str = ""
    """The controller's host: spans of other hosts have their own clock, so no window is applied to them."""

    def __call__(self, line: str, boot: str) -> bool:
        if line.startswith('{"dropped"'):
            return True
        if self.phases_only and _PHASE.search(line) is None:
            return False
        if self.window is None or (self.boot and boot != self.boot):
            return True
        start, end = _TIMES.search(line).groups()
        return int(start) <= self.window[1] and int(end) >= self.window[0]


_PHASE = re.compile(r'"kind": ?"phase"')
_TIMES = re.compile(r'"start": ?(\d+), ?"end": ?(\d+)')


def _process(file: Path, kept: _Kept) -> Process | None:
    with file.open(encoding="utf-8", errors="replace") as stream:
        try:
            first = stream.readline()
            if not first.endswith("\n"):
                return None
            header = parsed(first)
            process = Process(header["process"], header["pid"], header["boot"], header["clock"])
            if process.name == CONTROLLER:
                kept.boot = process.boot
            spans = [parsed(line) for line in stream if line.endswith("\n") and kept(line, process.boot)]
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file}: is no timeline of a process ({error}); delete it to see the others") from error
    for span in spans:
        if "name" not in span:
            process.dropped += span["dropped"]
        else:
            known = {name: span.pop(name) for name in ("name", "kind", "start", "end", "thread", "id")}
            process.pieces.append(TimelineSpan(**known, parent=span.pop("in"), more=span))
    process.pieces.sort(key=lambda piece: piece.start)
    return process

"""The timeline of this process: begun where a process is prepared, ended with it.

The environment variable `environment.TIMELINE` tells a process to record: JSON with `directory`, `offset_ns`, `boot`.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import json
import logging
import os
import time
from pathlib import Path

from torchtitan_rl.environment import TIMELINE
from torchtitan_rl.metrics import PHASES
from torchtitan_rl.record.recorder import Listener, Span
from torchtitan_rl.record.timeline.span_file import SpanFile
from torchtitan_rl.record.timeline.spans import Spans
from torchtitan_rl.record.tracing import GARBAGE, Kind, record_into

__all__ = ["LOOPS", "TimelineRecorder", "Phases", "phases_of", "begin"]

logger = logging.getLogger(__name__)

LOOPS = PHASES
"""The recorder's spans that consist of steps."""
CONTROLLER = "controller"
_LEAST_COLLECTION_NS = 1_000_000


class TimelineRecorder:
    """What this process records, into a file of its own below `directory`."""

    def __init__(self, name: str, directory: str, offset_ns: int, boot: str) -> None:
        """`offset_ns` is the wall clock minus the monotonic clock, as read on the host that booted as `boot`."""
        self.name, here = name, _boot()
        header = {"process": name, "pid": os.getpid(), "boot": here, "clock": offset_ns}
        if here != boot:
            offset_ns = _offset_ns()
        self.file = SpanFile(_new_file(Path(directory), f"{name}.{os.getpid()}"), header)
        self.spans = Spans(self.file, offset_ns, serves=name != CONTROLLER)
        self.file.before_write = self.spans.settle
        self._collecting = 0
        gc.callbacks.append(self._collects)
        record_into(self.spans)

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        """Hears of each garbage collection, which stops every thread of the process."""
        now = self.spans.now()
        if phase == "start":
            self._collecting = now
        elif now - self._collecting >= _LEAST_COLLECTION_NS:
            self.spans.leaf(GARBAGE, "work", self._collecting, now)

    def close(self) -> None:
        """Records nothing more, and writes what is left."""
        record_into(None)
        gc.callbacks.remove(self._collects)
        self.spans.settle(all=True)
        self.file.shutdown()


_mine: list[TimelineRecorder] = []
"""The timeline of this process, where it records one."""


def phases_of(directory: Path) -> list[Listener]:
    """What records the controller's process; nothing where this process records another run already, which
    would get the spans of both."""
    if _mine:
        logger.warning("record.timeline: this process records another run's timeline already; %s gets none", directory)
        return []
    return [Phases(directory)]


def begin(name: str) -> None:
    """Begins to record this process under `name`, where the environment says so."""
    if not _mine and (settings := os.environ.get(TIMELINE)):
        _mine.append(timeline := TimelineRecorder(name, **json.loads(settings)))
        atexit.register(timeline.close)


class Phases(Listener):
    """Records the controller's process: the spans that the loop tells the recorder are the phases of the timeline."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory, and has the processes that this one starts record too."""
        directory.mkdir(parents=True, exist_ok=True)
        settings = {"directory": str(directory.absolute()), "offset_ns": _offset_ns(), "boot": _boot()}
        os.environ[TIMELINE] = json.dumps(settings)
        self.timeline = TimelineRecorder(CONTROLLER, **settings)  # type: ignore[arg-type]  # the values are those of its arguments
        _mine.append(self.timeline)
        self._open: dict[int, tuple] = {}
        self._num_steps = 0

    def begin(self, span: Span) -> None:
        attributes = {"step": self._num_steps + 1} if span.name == "step" else None
        start = int(span.began * 1e9) + self.timeline.spans.offset_ns
        kind: Kind = "wait" if span.name.startswith("wait for") else "phase"
        self._open[id(span)] = self.timeline.spans.begin(span.name, start, attributes, kind=kind)
        if span.name in LOOPS:
            self._num_steps = span.done

    def advance(self, span: Span, pieces: int, text: str) -> None:
        if span.name in LOOPS:
            self._num_steps += pieces

    def end(self, span: Span, failed: bool) -> None:
        if span.name in LOOPS:
            self._num_steps = 0
        if id(span) in self._open:
            self.timeline.spans.end(self._open.pop(id(span)))

    def close(self) -> None:
        if self.timeline in _mine:
            os.environ.pop(TIMELINE, None)
            _mine.remove(self.timeline)
            self.timeline.close()


def _new_file(directory: Path, name: str) -> Path:
    """A file that did not exist: in a container a process has the same number after every restart."""
    for number in itertools.count(1):
        file = directory / (f"{name}.jsonl" if number == 1 else f"{name}.{number}.jsonl")
        try:
            file.touch(exist_ok=False)
            return file
        except FileExistsError:
            pass
    raise AssertionError


def _offset_ns() -> int:
    return time.time_ns() - time.perf_counter_ns()


def _boot() -> str:
    """What tells a start of this host's system from every other host's: one such start, one monotonic clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return os.uname().nodename

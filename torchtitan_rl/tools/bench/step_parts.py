"""Where the time of our side went: its processes record a timeline, and each repeat is a step of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_rl.record.recorder import Recorder, Span
from torchtitan_rl.record.timeline.recording import Phases
from torchtitan_rl.tools.timeline.critical_path import critical_path
from torchtitan_rl.tools.timeline.reading import Timeline
from torchtitan_rl.tools.timeline.step_spans import steps_of

__all__ = ["StepRecorder", "step_parts"]

_SMALL = 0.01
"""Parts below this share of a step are one part together."""


class StepRecorder:
    """Records this process, and those that it starts from now on, into `directory`."""

    def __init__(self, directory: Path) -> None:
        self._recorder, self._loop, self.number = Recorder([Phases(directory)]), Span(name="reinforcement"), 0

    @contextmanager
    def step(self) -> Iterator[Span]:
        """Records its block as the next step, `number`, counted from 1."""
        self.number += 1
        with self._recorder.span("step") as span:
            yield span
        self._recorder.advance(self._loop)

    def close(self) -> None:
        self._recorder.close()


def step_parts(directory: Path, numbers: Collection[int]) -> dict[str, float]:
    """Mean seconds of these steps by what is on their critical path, the longest first; their sum is a step's time."""
    timeline, seconds = Timeline.read(directory), defaultdict[str, float](float)
    for step in steps_of(timeline):
        if step.number in numbers:
            for stretch in critical_path(step, timeline):
                label = f"{stretch.process}: {stretch.name}" if stretch.process else stretch.name
                seconds[label] += stretch.seconds / len(numbers)
    total = sum(seconds.values())
    longest_first = sorted(seconds.items(), key=lambda part: -part[1])
    parts = {part: part_s for part, part_s in longest_first if part_s >= _SMALL * total}
    in_smaller_parts = total - sum(parts.values())
    return parts | (
        {f"{len(seconds) - len(parts)} smaller parts": in_smaller_parts} if len(seconds) > len(parts) else {}
    )

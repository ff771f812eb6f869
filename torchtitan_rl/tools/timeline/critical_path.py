"""The critical path of a step: what, made shorter, would have made the step shorter."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_rl.tools.timeline.reading import CONTROLLER, Process, Timeline, TimelineSpan
from torchtitan_rl.tools.timeline.step_spans import UNNAMED, StepSpans, leaves

__all__ = ["Stretch", "critical_path"]

_ANSWERING: dict[str, tuple[str, ...]] = {"wait for a batch": ("generator", "reward"), "wait for rewards": ("reward",)}
"""Waits that no role's name is in -> the roles whose work ends them."""
_ON_THE_WAY = "(between processes)"


@dataclass(slots=True)
class Stretch:
    """A part of the path: what went on, where, and for how long."""

    process: str
    name: str
    start: int
    end: int
    pieces: int = 1

    @property
    def seconds(self) -> float:
        return (self.end - self.start) / 1e9


def critical_path(step: StepSpans, timeline: Timeline) -> list[Stretch]:
    """The stretches from the step's beginning to its end, in order, without a gap.

    Goes back from the end: what ended last is what the rest waited for. A wait for another process is opened up into
    what that process did meanwhile; of several processes, the one whose work ended last.
    """
    path: list[Stretch] = []
    for start, end, piece in _backwards(step):
        if piece is None:
            path.append(Stretch(CONTROLLER, UNNAMED, start, end))
        elif piece.kind == "wait" and (process := _answering(piece, start, end, timeline)) is not None:
            path += reversed(_opened(process, start, end))
        else:
            path.append(Stretch(CONTROLLER, piece.name, start, end))
    return _joined(path[::-1])


def _backwards(step: StepSpans) -> list[tuple[int, int, TimelineSpan | None]]:
    pieces = sorted(leaves(step), key=lambda piece: piece.start)
    stretches: list[tuple[int, int, TimelineSpan | None]] = []
    now = step.phase.end
    while now > step.phase.start:
        before = [piece for piece in pieces if piece.start < now]
        if not before:
            stretches.append((step.phase.start, now, None))
            break
        # What goes on now, work first; else what ended last. Of several, the one that ended first after now.
        going = [piece for piece in before if piece.end >= now]
        work = [piece for piece in going if piece.kind == "work"]
        if going:
            piece = max(work, key=lambda p: p.start) if work else min(going, key=lambda p: (p.end, p.start))
        else:
            piece = max(before, key=lambda p: (p.end, -p.start))
            stretches.append((piece.end, now, None))
        start, end = piece.start, min(piece.end, now)
        # Work inside, which interrupts a wait or has a narrower name, is on the path itself.
        start = max([start, *(p.end for p in before if p.kind == "work" and p is not piece and p.end < end)])
        stretches.append((start, end, piece))
        now = start
    return stretches


def _answering(wait: TimelineSpan, start: int, end: int, timeline: Timeline) -> Process | None:
    """The process that a wait is for; None where none of them did anything meanwhile."""
    target, kinds = wait.name.removeprefix("wait for ").partition(".")[0], _ANSWERING.get(wait.name, ())

    def last(process: Process) -> int:
        return max((min(p.end, end) for p in process.pieces if p.kind == "work" and p.start < end), default=0)

    candidates = [process for process in timeline.processes if process.role == target or process.role.startswith(kinds)]
    return max((process for process in candidates if last(process) > start), key=last, default=None)


def _opened(process: Process, start: int, end: int) -> list[Stretch]:
    """What a process did from `start` to `end`: its innermost work, and messages on their way where it did nothing."""
    work = [p for p in process.pieces if p.kind == "work" and p.start < end and p.end > start]
    bounds = sorted({start, end, *(t for p in work for t in (p.start, p.end) if start < t < end)})
    stretches = []
    for begins, ends in zip(bounds, bounds[1:]):
        inside = [p for p in work if p.start <= begins and p.end >= ends]
        name = max(inside, key=lambda p: p.start).name if inside else _ON_THE_WAY
        stretches.append(Stretch(process.name if inside else "", name, begins, ends))
    return stretches


def _joined(path: list[Stretch]) -> list[Stretch]:
    """The path with equal neighbours as one."""
    merged: list[Stretch] = []
    for stretch in path:
        if merged and (merged[-1].process, merged[-1].name) == (stretch.process, stretch.name):
            merged[-1].end, merged[-1].pieces = stretch.end, merged[-1].pieces + 1
        else:
            merged.append(stretch)
    return merged

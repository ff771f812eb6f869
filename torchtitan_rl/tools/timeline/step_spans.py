"""The steps of a run, and what each one's time was: a named piece of work or a named wait at every moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchtitan_rl.metrics import PHASES
from torchtitan_rl.record.tracing import GARBAGE
from torchtitan_rl.tools.timeline.reading import Process, Timeline, TimelineSpan

__all__ = ["StepSpans", "UNNAMED", "steps_of", "leaves", "shares", "accounted", "busy", "union_ns"]

UNNAMED = "(unnamed)"
"""Time of a step in which no span says what happened."""


@dataclass(frozen=True, slots=True)
class StepSpans:
    """A batch of the reinforcement phase: generation, training, publication."""

    number: int
    """The number of its first optimizer step, from 1."""
    phase: TimelineSpan
    controller: Process

    @property
    def seconds(self) -> float:
        return (self.phase.end - self.phase.start) / 1e9


def steps_of(timeline: Timeline) -> list[StepSpans]:
    """The steps of the reinforcement phase in order. After a resume, without those that the attempt before had made
    beyond its checkpoint."""
    by_number: dict[int, StepSpans] = {}
    attempts = [steps for controller in timeline.controllers if (steps := _steps_in(controller))]
    for steps in sorted(attempts, key=lambda steps: steps[0].phase.start):
        by_number = {number: step for number, step in by_number.items() if number < steps[0].number}
        by_number |= {step.number: step for step in steps}
    return [by_number[number] for number in sorted(by_number)]


def _steps_in(controller: Process) -> list[StepSpans]:
    """The steps that one attempt made, the earliest first."""
    return [
        StepSpans(piece.more["step"], piece, controller)
        for piece in controller.pieces
        if piece.name == "step" and "step" in piece.more and not _early(piece, controller)
    ]


def _early(step: TimelineSpan, controller: Process) -> bool:
    """Whether a step is one of a phase before reinforcement."""
    phases = (piece for piece in controller.pieces if piece.kind == "phase" and piece.name in PHASES[:-1])
    return any(phase.start <= step.start <= phase.end for phase in phases)


def leaves(step: StepSpans) -> list[TimelineSpan]:
    """The work and the waits that the step consists of, cut to the step.

    Waits count where they belong to the step: a batch that is played for a later step is not what this one waits for.
    Work of the controller's thread counts whatever it is for: meanwhile nothing else is done there.
    """
    start, end = step.phase.start, step.phase.end
    near = [piece for piece in step.controller.pieces if piece.start < end and piece.end > start]
    phases = {piece.id: piece for piece in step.controller.pieces if piece.kind == "phase"}
    own = {step.phase.id: True}

    def belongs(phase: int) -> bool:
        if phase not in own:
            piece = phases.get(phase)
            above = None if piece is None else phases.get(piece.parent)
            inside = above is not None and above.start <= piece.start and piece.end <= above.end
            own[phase] = inside and belongs(piece.parent)
        return own[phase]

    mine = [
        piece
        for piece in near
        if (piece.kind == "wait" and belongs(piece.parent))
        or (piece.kind == "work" and (piece.thread == step.phase.thread or piece.name == GARBAGE))
    ]
    return [
        TimelineSpan(piece.name, piece.kind, max(start, piece.start), min(end, piece.end), piece.thread)
        for piece in mine
    ]


def moments(step: StepSpans) -> list[tuple[int, int, str]]:
    """The step from beginning to end as (start, end, name): work goes before waits, the latest begun first; of waits
    the one that began first, since calls are answered in order."""
    pieces = leaves(step)
    bounds = sorted({step.phase.start, step.phase.end, *(p.start for p in pieces), *(p.end for p in pieces)})
    begins = sorted(pieces, key=lambda piece: piece.start, reverse=True)
    going: list[TimelineSpan] = []
    parts = []
    for start, end in zip(bounds, bounds[1:]):
        while begins and begins[-1].start <= start:
            going.append(begins.pop())
        going = [piece for piece in going if piece.end > start]
        work = [piece for piece in going if piece.kind == "work"]
        if work:
            name = max(work, key=lambda piece: piece.start).name
        else:
            name = min(going, key=lambda piece: (piece.start, piece.end)).name if going else UNNAMED
        parts.append((start, end, name))
    return parts


def shares(step: StepSpans) -> Counter[str]:
    """Seconds of the step by what happened. Their sum is the step's time."""
    seconds: Counter[str] = Counter()
    for start, end, name in moments(step):
        seconds[name] += (end - start) / 1e9  # type: ignore[assignment]  # a Counter of seconds
    return seconds


def accounted(step: StepSpans) -> float:
    """The share of the step's wall time that leaves account for, between 0 and 1."""
    return union_ns(leaves(step), step.phase.start, step.phase.end) / max(1, step.phase.end - step.phase.start)


def busy(process: Process, steps: Sequence[StepSpans]) -> float:
    """The share of the steps' time in which a process worked, on any of its threads."""
    work = [piece for piece in process.pieces if piece.kind == "work"]
    total = sum(step.phase.end - step.phase.start for step in steps)
    return sum(union_ns(work, step.phase.start, step.phase.end) for step in steps) / max(1, total)


def union_ns(pieces: Iterable[TimelineSpan], start: int, end: int) -> int:
    """Nanoseconds from `start` to `end` in which at least one of the pieces goes on."""
    covered, reached = 0, start
    for piece in sorted(pieces, key=lambda piece: piece.start):
        begins, ends = max(piece.start, reached), min(piece.end, end)
        if ends > begins:
            covered, reached = covered + ends - begins, ends
    return covered

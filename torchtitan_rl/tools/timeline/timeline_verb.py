"""`torchtitan-rl timeline RUN`: where the time of steps went, in words."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import multimode

from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.tools.timeline import trace
from torchtitan_rl.tools.timeline.critical_path import Stretch, critical_path
from torchtitan_rl.tools.timeline.reading import Timeline
from torchtitan_rl.tools.timeline.step_spans import StepSpans, accounted, busy, shares, steps_of

__all__ = ["add_arguments", "run", "report", "chosen"]

_SMALL = 0.005
"""Shares of a step below this one are told together."""
_LAST = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory")
    steps_group = parser.add_mutually_exclusive_group()
    steps_group.add_argument("--step", type=int, metavar="N", help="the batch that optimizer step N belongs to")
    steps_group.add_argument("--last", type=int, metavar="K", help=f"the last K batches; default: {_LAST}")
    parser.add_argument("--trace", default="", metavar="FILE", help="write a .json or .json.gz for ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    directory = Run.open(args.run).path / "timeline"
    if args.trace:
        for name in ("step", "last"):
            if (value := getattr(args, name)) is not None:
                raise ValueError(f"--{name}={value}: a trace has every step; leave --{name} out, or --trace")
        timeline = Timeline.read(directory)
        try:
            number = trace.write(timeline, Path(args.trace))
        except OSError as error:
            raise ValueError(
                f"--trace={args.trace}: cannot be written ({error.strerror}); give a file in a directory that you may "
                "write to"
            ) from error
        print(f"{args.trace}: {number} events; open it at https://ui.perfetto.dev")
        return 0
    last = _LAST if args.last is None else args.last
    steps = chosen(steps_of(Timeline.read(directory, phases_only=True)), args.step, last)
    window = min(step.phase.start for step in steps), max(step.phase.end for step in steps)
    timeline = Timeline.read(directory, window=window)
    wanted = {step.number for step in steps}
    print("\n".join(report(timeline, [step for step in steps_of(timeline) if step.number in wanted])))
    return 0


def chosen(steps: list[StepSpans], number: int | None, last: int) -> list[StepSpans]:
    """The batch of optimizer step `number`, or the last so many. Raises ValueError where the timeline has none."""
    if last < 1:
        raise ValueError(f"last={last}: must be at least 1")
    if not steps:
        raise ValueError("steps=[]: the timeline has no complete step of the reinforcement phase yet; look again later")
    if number is None:
        return steps[-last:]
    before = [step for step in steps if step.number <= number]
    # Most batches have as many optimizer steps; filters may leave one with fewer. Of a single one nobody knows here.
    per_batch = max(multimode(after.number - one.number for one, after in zip(steps, steps[1:])), default=0)
    end = steps[-1].number + max(per_batch - 1, 0)
    if not before or per_batch and number > end:
        raise ValueError(f"step={number}: the timeline has steps {steps[0].number} to {end}; give one")
    return before[-1:]


def report(timeline: Timeline, steps: Sequence[StepSpans]) -> list[str]:
    """The lines that the command prints about these steps; the critical path is of the last one."""
    total = sum(step.seconds for step in steps)
    seconds: Counter[str] = sum((shares(step) for step in steps), Counter())
    named = f"step {steps[0].number}" if len(steps) == 1 else f"steps {steps[0].number} to {steps[-1].number}"
    least = min(accounted(step) for step in steps)
    lines = [f"{named}: {total / len(steps):.3f} s a step; spans account for {least:.1%} or more of each", ""]
    lines += ["where the time of a step went, as the controller saw it"]
    lines += _table({name: name_s / len(steps) for name, name_s in seconds.most_common()}, total / len(steps))
    lines += ["", "busy"]
    for process in timeline.processes:
        here = [step for step in steps if process.pieces and _overlaps(process, step)]
        if here:
            lines.append(f"  {busy(process, here):6.1%}  {process.name} ({process.pid})")
    lines += ["", f"critical path of step {steps[-1].number}"]
    lines += _path(critical_path(steps[-1], timeline), steps[-1].seconds)
    if moved := {process.name: process.moved_ns / 1e6 for process in timeline.processes if process.moved_ns}:
        lines += ["", f"clocks of other hosts, ahead of the controller's by ms: {moved}"]
    if dropped := {process.name: process.dropped for process in timeline.processes if process.dropped}:
        lines += ["", f"spans that could not be written: {dropped}"]
    return lines


def _table(seconds: dict[str, float], total: float) -> list[str]:
    shown = {name: name_s for name, name_s in seconds.items() if name_s >= _SMALL * total}
    rest = sum(seconds.values()) - sum(shown.values())
    if rest > 0:
        shown[f"{len(seconds) - len(shown)} smaller ones"] = rest
    return [f"  {name_s:9.3f} s {name_s / total:6.1%}  {name}" for name, name_s in shown.items()]


def _path(path: Sequence[Stretch], total: float) -> list[str]:
    """The path in order; stretches of one name with only short ones between them are one line."""
    shown: list[tuple[str, float, int]] = []
    short = [stretch for stretch in path if stretch.seconds < _SMALL * total]
    for stretch in path:
        if stretch.seconds >= _SMALL * total:
            label = f"{stretch.process}: {stretch.name}" if stretch.process else stretch.name
            same = bool(shown) and shown[-1][0] == label
            _, seconds, pieces = shown.pop() if same else (label, 0.0, 0)
            shown.append((label, seconds + stretch.seconds, pieces + stretch.pieces))
    rest = sum(stretch.seconds for stretch in short)
    lines = [f"{s:9.3f} s {s / total:6.1%}  {label}" + f" x {n}" * (n > 1) for label, s, n in shown]
    lines += [f"{rest:9.3f} s {rest / total:6.1%}  {len(short)} shorter stretches between them"] if short else []
    return [f"  {line}" for line in lines]


def _overlaps(process, step: StepSpans) -> bool:
    last = max(piece.end for piece in process.pieces)
    return process.pieces[0].start < step.phase.end and last > step.phase.start

"""Seconds from the quickstart's command to its first step of reinforcement, and to its end, of a run of 2 + 2 steps or
of the whole quickstart.

The run's own timeline says where the time went. Nothing bounds a run from below; another checkout may stand beside it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_rl.tools.bench.measurement import OURS, interval
from torchtitan_rl.tools.timeline.reading import Timeline, TimelineSpan
from torchtitan_rl.tools.timeline.step_spans import steps_of

__all__ = ["STARTUP", "WHOLE", "Form", "Start", "StartMeasurement", "measure_start", "quickstart_of"]

_RUN_S = 1800.0
_SHORT = (
    *("--supervised.num-steps", "2", "--controller.num-steps", "2", "--controller.eval-every", "0"),
    *("--controller.eval-tasks", "8", "--controller.test-tasks", "8"),
)
_BEFORE, _AFTER = "before the first phase: imports, config, checks", "after the last phase"
_STEPS = "supervised", "reinforcement"


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One run. Seconds since the command was started."""

    first_step_s: float
    """Until the first step of reinforcement had ended."""
    end_s: float
    """Until the command had ended."""
    parts: dict[str, float]
    """Seconds by phase of the run, in order; they sum to `end_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """How much of the quickstart runs, and which of its times is compared with another checkout's."""

    name: str
    overrides: tuple[str, ...]
    until: str
    seconds: Callable[[Start], float]


STARTUP = Form(
    name="startup: quickstart of 2 + 2 steps",
    overrides=_SHORT,
    until="to the first step",
    seconds=lambda start: start.first_step_s,
)
WHOLE = Form(name="quickstart: the whole command", overrides=(), until="to the end", seconds=lambda start: start.end_s)


@dataclass(kw_only=True, slots=True)
class StartMeasurement:
    """The runs of this checkout, and those of another one, in turn."""

    form: Form
    sides: dict[str, list[Start]]

    def as_data(self) -> dict[str, Any]:
        sides = {
            side: {
                "first_step_s": [start.first_step_s for start in starts],
                "end_s": [start.end_s for start in starts],
                "parts_s": _mean_parts(starts),
            }
            for side, starts in self.sides.items()
        }
        return {"name": self.form.name, "sides": sides}

    def lines(self) -> list[str]:
        """The measurement for a person."""
        lines = [self.form.name]
        for side, starts in self.sides.items():
            for label, seconds in (
                ("to the first step", [start.first_step_s for start in starts]),
                ("to the end", [start.end_s for start in starts]),
            ):
                spread = f"({min(seconds):.1f} to {max(seconds):.1f})"
                lines.append(f"  {side}: {label:17} {median(seconds):7.2f} s {spread}")
            lines += [f"    {seconds:8.2f} s  {part}" for part, seconds in _mean_parts(starts).items()]
        for side, starts in self.sides.items():
            if side != OURS:
                pairs = zip(self.sides[OURS], starts, strict=True)
                ratios = [self.form.seconds(ours) / self.form.seconds(other) for ours, other in pairs]
                low, high = interval(ratios)
                ratio = f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"
                lines.append(f"  {OURS} / {side}, seconds {self.form.until}: {ratio}")
        return lines


def measure_start(form: Form, against: str, repeats: int, note: Callable[[str], None]) -> StartMeasurement:
    """Runs the quickstart's config, of this package and with `against` of another checkout too. The other one runs with
    this one's packages. Raises ValueError for a directory that is no checkout, RuntimeError for a run that fails."""
    package = Path(__file__).parents[2]
    sides = {OURS: (package.parent, package / "assets" / "quickstart.py")}
    if against:
        sides[against] = quickstart_of(against)
    starts: dict[str, list[Start]] = {side: [] for side in sides}
    for repeat in range(repeats):
        order = list(sides)[:: -1 if repeat % 2 else 1]
        for side in order:
            note(f"{side}, repeat {repeat + 1} of {repeats}")
            starts[side].append(_run(*sides[side], form.overrides))
    return StartMeasurement(form=form, sides=starts)


def quickstart_of(against: str) -> tuple[Path, Path]:
    """The root of another checkout and its quickstart's config. Raises ValueError for a directory that is none."""
    root = Path(against).expanduser().resolve()
    config = root / "torchtitan_rl" / "assets" / "quickstart.py"
    if not config.exists():
        raise ValueError(f"--against={against!r}: has no torchtitan_rl/assets/quickstart.py; give a checkout")
    return root, config


def _run(root: Path, config: Path, overrides: tuple[str, ...]) -> Start:
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-", ignore_cleanup_errors=True) as scratch:
        run, log = Path(scratch, "run"), Path(scratch, "log")
        command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(config), "--quiet", *overrides]
        began, began_ns = time.perf_counter(), time.time_ns()
        fault = ""
        with log.open("w") as output:
            try:
                done = subprocess.run(
                    [*command, "--record.timeline", "True", "--output-dir", str(run)],
                    cwd=scratch,
                    env=os.environ | {"PYTHONPATH": str(root), "TMPDIR": scratch},
                    stdout=output,
                    stderr=output,
                    timeout=_RUN_S,
                )
                if done.returncode:
                    fault = f"training ended with {done.returncode}"
            except subprocess.TimeoutExpired:
                fault = f"training had not ended after {_RUN_S:g} s"
        end_s = time.perf_counter() - began
        if fault:  # the log goes with its directory
            last = "\n".join(log.read_text().splitlines()[-3:])
            raise RuntimeError(f"checkout={str(root)!r}: {fault}\n{last}")
        timeline = Timeline.read(run / "timeline")
        first_step_s = (steps_of(timeline)[0].phase.end - began_ns) / 1e9
        return Start(first_step_s=first_step_s, end_s=end_s, parts=_parts(timeline, began_ns, end_s))


def _parts(timeline: Timeline, began_ns: int, end_s: float) -> dict[str, float]:
    """Seconds of each outermost phase, the steps of a loop apart, and of what lies between, before and after them."""
    (controller,) = timeline.controllers
    phases = [piece for piece in controller.pieces if piece.kind == "phase"]
    loops = {piece.id for piece in phases if piece.name in _STEPS}
    outer = [piece for piece in phases if not piece.parent and piece.id not in loops]
    outer += [piece for piece in phases if piece.parent in loops and piece.name == "step"]
    parts: dict[str, float] = {}
    now, names = began_ns, {piece.id: piece.name for piece in phases}

    def add(name: str, nanoseconds: int) -> None:
        parts[name] = parts.get(name, 0.0) + nanoseconds / 1e9

    for piece in sorted(outer, key=lambda piece: piece.start):
        if piece.end <= now:
            continue
        add(_BEFORE if now == began_ns else "between phases", max(0, piece.start - now))
        add(_label(piece, names), piece.end - max(now, piece.start))
        now = piece.end
    add(_AFTER, max(0, began_ns + int(end_s * 1e9) - now))
    return parts


def _label(piece: TimelineSpan, names: dict[int, str]) -> str:
    if piece.name != "step":
        return piece.name
    loop = names[piece.parent]
    return f"{loop}: step 1" if piece.more.get("step") == 1 else f"{loop}: later steps"


def _mean_parts(starts: list[Start]) -> dict[str, float]:
    names = dict.fromkeys(name for start in starts for name in start.parts)
    return {name: sum(start.parts.get(name, 0.0) for start in starts) / len(starts) for name in names}

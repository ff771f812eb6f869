"""A run's phases as parts of the time since its command."""

import subprocess
from pathlib import Path

import pytest

from torchtitan_rl.tools.bench import starting
from torchtitan_rl.tools.bench.starting import STARTUP, WHOLE, Start, StartMeasurement, _parts
from torchtitan_rl.tools.timeline.reading import Process, Timeline, TimelineSpan

SECOND = 10**9


def phase(name: str, start: float, end: float, id: int, parent: int = 0, **more) -> TimelineSpan:
    return TimelineSpan(name, "phase", int(start * SECOND), int(end * SECOND), id=id, parent=parent, more=more)


def test_the_parts_of_a_run_sum_to_its_time():
    pieces = [
        phase("starting", 3, 10, 1),
        phase("supervised", 10, 14, 2),
        phase("step", 10, 13, 3, parent=2, step=1),
        phase("step", 13, 13.5, 4, parent=2, step=2),
        phase("reinforcement", 15, 20, 5),
        phase("step", 15, 18, 6, parent=5, step=1),
        phase("generate", 15, 17, 7, parent=6),
        phase("step", 18, 19, 8, parent=5, step=2),
    ]
    timeline = Timeline([Process("controller", 1, "boot", 0, pieces)])
    parts = _parts(timeline, 0, 21.0)
    assert parts == {
        "before the first phase: imports, config, checks": 3.0,
        "starting": 7.0,
        "between phases": 1.5,
        "supervised: step 1": 3.0,
        "supervised: later steps": 0.5,
        "reinforcement: step 1": 3.0,
        "reinforcement: later steps": 1.0,
        "after the last phase": 2.0,
    }
    assert sum(parts.values()) == 21.0


def test_two_checkouts_are_compared_run_by_run():
    def start(seconds: float) -> Start:
        return Start(first_step_s=seconds, end_s=seconds + 1, parts={"starting": seconds})

    sides = {"ours": [start(10.0), start(12.0), start(14.0)], "../other": [start(20.0), start(10.0), start(14.0)]}
    lines = StartMeasurement(form=STARTUP, sides=sides).lines()
    assert lines[-1] == "  ours / ../other, seconds to the first step: 1.00 (0.50 to 1.20)"
    lines = StartMeasurement(form=WHOLE, sides=sides).lines()
    assert lines[0] == "quickstart: the whole command"
    assert lines[-1] == "  ours / ../other, seconds to the end: 1.00 (0.52 to 1.18)"


@pytest.mark.parametrize("code, fault", [(3, "training ended with 3"), (None, "training had not ended after 1800 s")])
def test_a_run_that_fails_is_named_with_the_end_of_its_log(monkeypatch, code, fault):
    def run(command, stdout, timeout, **named):
        stdout.write("last words\n")
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(starting.subprocess, "run", run)
    with pytest.raises(RuntimeError, match=f"^checkout='/checkout': {fault}\nlast words$"):
        starting._run(Path("/checkout"), Path("/checkout/config.py"), ())

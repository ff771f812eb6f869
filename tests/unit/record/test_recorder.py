"""What listeners of a run hear, and what a person sees of it."""

import io

import pytest

from tests.kit.listener import EventLog
from torchtitan_rl.record.console.display import Display
from torchtitan_rl.record.console.progress import Progress
from torchtitan_rl.record.recorder import Metrics, Recorder
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.run_dir_writer import RunDirWriter


def test_listeners_hear_facts_and_spans_in_order():
    notes = EventLog()
    recorder = Recorder([notes])
    with pytest.raises(KeyError), recorder.span("phase", total=2) as phase:
        with recorder.span("step") as step:
            recorder.record(Metrics(line={"step": 1}))
        recorder.advance(phase, text="half")
        raise KeyError
    assert notes.events == [
        ("begin", "phase"),
        ("begin", "step"),
        ("metrics", Metrics(line={"step": 1})),
        ("end", "step", False),
        ("advance", "phase", 1, "half"),
        ("end", "phase", True),
    ]
    assert 0 <= step.seconds <= phase.seconds and step.ended is not None


def test_a_span_that_goes_on_says_how_long_it_has_taken_so_far():
    with Recorder().span("step") as step:
        first = step.seconds
        assert step.ended is None and step.seconds >= first >= 0


def test_a_run_directory_gets_lines_of_metrics(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    Recorder([RunDirWriter(run_dir)]).record(Metrics(line={"step": 3, "phase": "evaluation"}, text="for people"))
    assert run_dir.read_metrics() == [{"step": 3, "phase": "evaluation"}]


def test_a_person_sees_phases_waits_and_lines_but_no_parts_of_a_step():
    shown = io.StringIO()
    recorder = Recorder([Display(Progress(file=shown, clock=lambda: 0.0))])
    with recorder.span("starting", expected_s=15, shown=True):
        pass
    with pytest.raises(KeyError), recorder.span("reinforcement", total=2) as phase:
        with recorder.span("generate"):
            recorder.record(Metrics(line={}, text="step 1"))
        recorder.advance(phase, text="reward 0.5")
        raise KeyError
    assert shown.getvalue().splitlines() == [
        "starting: about 15 s",
        "starting: done in 0.0 s",
        "step 1",
        "reinforcement: 1/2 stopped after 0.0 s, reward 0.5",
    ]

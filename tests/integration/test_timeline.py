"""The timeline of real runs: every process is there, on one clock, and the time of every step has names."""

import gzip
import json

import pytest

from tests.integration.conftest import ROOT, watched
from torchtitan_rl.cli import main
from torchtitan_rl.tools.timeline.critical_path import critical_path
from torchtitan_rl.tools.timeline.reading import Timeline
from torchtitan_rl.tools.timeline.step_spans import accounted, leaves, shares, steps_of

NAMED = 0.98
"""The share of each step's wall time that leaf spans must account for."""


def test_every_process_of_a_run_is_on_one_clock(short_run):
    timeline = Timeline.read(short_run.path / "timeline")
    assert [process.name for process in timeline.processes] == ["controller", "generator-0-0", "policy-0"]
    assert not any(process.dropped for process in timeline.processes)
    controller, generator, policy = timeline.processes
    waits = [piece for piece in controller.pieces if piece.name == "wait for policy.forward_backward"]
    answers = [piece for piece in policy.pieces if piece.name == "policy.forward_backward"]
    assert len(waits) == len(answers) == 4  # two steps of each phase
    for wait, answer in zip(waits, answers):
        assert wait.start - 5e6 < answer.start < answer.end < wait.end  # the message may arrive before `call` returns
    assert {"engine step", "load weights", "wait for a request"} <= {piece.name for piece in generator.pieces}
    assert [piece.more["version"] for piece in generator.pieces if piece.name == "fetch weights"] == [0, 2, 3, 4]


def test_steps_consist_of_named_work_and_named_waits(short_run):
    timeline = Timeline.read(short_run.path / "timeline")
    steps = steps_of(timeline)
    assert [step.number for step in steps] == [1, 2]
    lines = [json.loads(line) for line in (short_run.path / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["time/step_s"] for line in lines if line["phase"] == "reinforcement"]
    for step, measured in zip(steps, seconds, strict=True):
        assert step.seconds == pytest.approx(measured, abs=0.002)
        assert sum(shares(step).values()) == pytest.approx(step.seconds)
        assert accounted(step) > 0.9  # a step of a few tenths of a second; NAMED holds for the quickstart's, below
        path = critical_path(step, timeline)
        assert sum(stretch.seconds for stretch in path) == pytest.approx(step.seconds)
        assert {"generator-0-0", "policy-0"} <= {stretch.process for stretch in path}


def test_the_command_prints_a_report_and_writes_a_trace(short_run, tmp_path, capsys):
    assert main.main(["timeline", str(short_run.path), "--step", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("step 2: ") and "critical path of step 2" in printed
    assert "wait for generator-0.sample" in printed and "policy-0" in printed
    file = tmp_path / "trace.json.gz"
    assert main.main(["timeline", str(short_run.path), "--trace", str(file)]) == 0
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert {"M", "X"} == {event["ph"] for event in events}
    assert main.main(["timeline", str(tmp_path)]) == 1
    assert "has no timeline; train with --record.timeline True" in capsys.readouterr().err


QUICKSTART = [
    *("--supervised.num-steps", "5", "--controller.num-steps", "12", "--controller.eval-every", "4"),
    *("--controller.eval-tasks", "32", "--controller.test-tasks", "32", "--record.timeline", "True"),
]
"""The quickstart's own batches, fewer of them."""


def assert_named(steps):
    """On idle cores every step reaches NAMED. A busy machine may stop the controller for a dozen milliseconds between
    two pieces of work, which no span can name: in one step at most."""
    least, *others = sorted(accounted(step) for step in steps)
    assert least >= 0.95 and min(others) >= NAMED, [f"{accounted(step):.4f}" for step in steps]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_leaf_spans_account_for_each_step(tmp_path, lag):
    command = ["train", str(ROOT / "configs" / "quickstart.py"), *QUICKSTART, "--algorithm.max-policy-lag", str(lag)]
    watched(command, tmp_path / "run")
    steps = steps_of(Timeline.read(tmp_path / "run" / "timeline"))
    assert len(steps) == 12
    assert_named(steps)


@pytest.mark.slow
def test_steps_with_environments_have_names_too(tmp_path):
    short = ["--supervised.num-steps", "3", "--controller.num-steps", "4", "--controller.eval-every", "0"]
    tasks = ["--controller.eval-tasks", "16", "--controller.test-tasks", "16", "--record.timeline", "True"]
    watched(["train", str(ROOT / "configs" / "calculator.py"), *short, *tasks], tmp_path / "run")
    steps = steps_of(Timeline.read(tmp_path / "run" / "timeline"))
    assert len(steps) == 4
    assert_named(steps)
    assert all("run an environment" in {piece.name for piece in leaves(step)} for step in steps)


@pytest.mark.slow
def test_chosen_ranks_are_profiled_in_chosen_steps(tmp_path):
    ranks = ["--profile", "2", "--record.profile.ranks", "policy-0", "generator-0-0"]
    steps = ["--supervised.num-steps", "1", "--controller.num-steps", "3", "--algorithm.tasks-per-step", "4"]
    watched(["train", str(ROOT / "configs" / "quickstart.py"), *steps, *ranks], tmp_path / "run")
    files = sorted((tmp_path / "run" / "timeline" / "profile").iterdir())
    assert [file.name for file in files] == ["step-2.generator-0-0.json.gz", "step-2.policy-0.json.gz"]
    for file in files:
        names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert {"aten::mm", "aten::addmm", "_C::onednn_mm"} & names  # of the engine's thread too

"""Reading timelines: made-up spans with times that can be checked by hand."""

import argparse
import gzip
import json
from types import SimpleNamespace

import pytest

from torchtitan_rl.cli import main
from torchtitan_rl.tools.timeline import timeline_verb, trace
from torchtitan_rl.tools.timeline.critical_path import critical_path
from torchtitan_rl.tools.timeline.reading import Timeline
from torchtitan_rl.tools.timeline.step_spans import UNNAMED, accounted, busy, shares, steps_of

MS = 1_000_000


def write(directory, name, rows, *, boot="here", ahead_ms=0.0, tail=""):
    """A process's file; a row is (name, kind, start, end, id, parent) in milliseconds, and further attributes."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"process": name, "pid": 1, "boot": boot, "clock": 0})]
    for span, kind, start, end, id, parent, *more in rows:
        times = {"start": int((start + ahead_ms) * MS), "end": int((end + ahead_ms) * MS)}
        content = {"name": span, "kind": kind, **times, "thread": "MainThread", "id": id, "in": parent}
        lines.append(json.dumps(content | (more[0] if more else {})))
    (directory / f"{name}.1.jsonl").write_text("\n".join(lines) + "\n" + tail)


CONTROLLER = [
    ("reinforcement", "phase", 0, 200, 1, 0),
    ("step", "phase", 0, 100, 2, 1, {"step": 1}),
    ("generate", "phase", 0, 40, 3, 2),
    ("play rollouts", "work", 0, 10, 10, 3),
    ("wait for generator-0.sample", "wait", 8, 40, 11, 3),
    ("send policy.forward_backward", "work", 42, 44, 12, 2),
    ("wait for policy.forward_backward", "wait", 44, 80, 13, 2),
    ("wait for policy.optim_step", "wait", 44, 95, 14, 2),
    ("play a batch", "phase", 30, 150, 4, 3),  # of the next step: outlives the phase that began it
    ("wait for generator-0.sample", "wait", 35, 150, 15, 4),
]
POLICY = [("policy.forward_backward", "work", 50, 78, 1, 0), ("policy.optim_step", "work", 80, 94, 2, 0)]
GENERATOR = [("engine step", "work", 12, 20.8, 1, 0), ("engine step", "work", 21, 38, 2, 0)]


@pytest.fixture
def timeline(tmp_path):
    write(tmp_path / "timeline", "controller", CONTROLLER, tail='{"name": "half')
    write(tmp_path / "timeline", "policy-0", POLICY)
    write(tmp_path / "timeline", "generator-0-0", GENERATOR)
    return Timeline.read(tmp_path / "timeline")


def test_the_time_of_a_step_is_divided_without_rest(timeline):
    [step] = steps_of(timeline)
    found = {name: round(seconds * 1000, 6) for name, seconds in shares(step).items()}
    assert found == {
        "play rollouts": 10,
        "wait for generator-0.sample": 30,  # work goes before waits, and the next batch's wait is not this step's
        UNNAMED: 7,  # 40 to 42, 95 to 100
        "send policy.forward_backward": 2,
        "wait for policy.forward_backward": 36,  # it was asked first
        "wait for policy.optim_step": 15,
    }
    assert accounted(step) == pytest.approx(0.93)


def test_how_busy_each_process_was(timeline):
    steps = steps_of(timeline)
    assert {p.name: busy(p, steps) for p in timeline.processes} == {
        "controller": pytest.approx(0.12),
        "generator-0-0": pytest.approx(0.258),
        "policy-0": pytest.approx(0.42),
    }


def test_the_critical_path_has_no_gap_and_opens_waits_up(timeline):
    [step] = steps_of(timeline)
    path = critical_path(step, timeline)
    assert path[0].start == step.phase.start and path[-1].end == step.phase.end
    assert all(one.end == other.start for one, other in zip(path, path[1:]))
    told = [(stretch.process, stretch.name) for stretch in path if stretch.seconds >= 0.008]
    assert told == [
        ("controller", "play rollouts"),
        ("generator-0-0", "engine step"),
        ("generator-0-0", "engine step"),
        ("policy-0", "policy.forward_backward"),
        ("policy-0", "policy.optim_step"),
    ]


def test_narrower_names_go_before_wider_ones(tmp_path):
    loop, inner = ("run the loop", "work", 0, 100, 3, 2), ("make training data", "work", 40, 60, 4, 2)
    write(tmp_path, "controller", [("step", "phase", 0, 100, 2, 0, {"step": 1}), loop, inner])
    timeline = Timeline.read(tmp_path)
    [step] = steps_of(timeline)
    assert {name: round(seconds, 6) for name, seconds in shares(step).items()} == {
        "run the loop": 0.08, "make training data": 0.02,
    }  # fmt: skip
    told = [(stretch.name, round(stretch.seconds, 6)) for stretch in critical_path(step, timeline)]
    assert told == [("run the loop", 0.04), ("make training data", 0.02), ("run the loop", 0.04)]


@pytest.mark.parametrize("ahead_ms", [0, 5000, -120_000])
def test_a_host_with_another_clock_is_moved_to_the_controllers(tmp_path, ahead_ms):
    write(tmp_path / "timeline", "controller", CONTROLLER)
    write(tmp_path / "timeline", "policy-0", POLICY, boot="there", ahead_ms=ahead_ms)
    process = Timeline.read(tmp_path / "timeline").processes[1]
    windowed = Timeline.read(tmp_path / "timeline", window=(0, 60 * MS)).processes[1]
    assert windowed.moved_ns == process.moved_ns
    # optim_step ends 1 ms before its answer and begins 36 ms after it was asked; forward_backward: 2 and 6.
    assert process.moved_ns == pytest.approx((ahead_ms + (6 - 1) / 2) * MS)


def test_a_step_made_again_counts_once_and_supervised_steps_do_not(tmp_path):
    supervised = [("supervised", "phase", 0, 50, 1, 0), ("step", "phase", 1, 9, 2, 1, {"step": 1})]
    again = [("reinforcement", "phase", 100, 200, 3, 0), ("step", "phase", 100, 120, 4, 3, {"step": 1})]
    write(tmp_path, "controller", [*supervised, *again, ("step", "phase", 130, 150, 5, 3, {"step": 1})])
    [step] = steps_of(Timeline.read(tmp_path))
    assert step.phase.start == 130 * MS


@pytest.mark.parametrize("last, told", [("10", "steps 1 to 7"), ("4", "steps 4 to 7"), ("2", "steps 6 to 7")])
def test_steps_beyond_the_checkpoint_of_a_resumed_run_do_not_count(tmp_path, capsys, last, told):
    (tmp_path / "config.json").write_text("{}")
    for begin, numbers in ((0, range(1, 11)), (5000, (6, 7))):  # the first attempt's checkpoint was that of step 5
        steps = [("step", "phase", begin + 10 * n, begin + 10 * n + 9, n, 0, {"step": n}) for n in numbers]
        write(tmp_path / "timeline", "controller", steps)
        (tmp_path / "timeline" / "controller.1.jsonl").rename(tmp_path / "timeline" / f"controller.{begin}.jsonl")
    assert main.main(["timeline", str(tmp_path), "--last", last]) == 0
    assert capsys.readouterr().out.startswith(f"{told}: 0.009 s a step")


def test_a_trace_is_chromes_trace_event_format(timeline, tmp_path):
    """As documented: complete events with pid, tid, ts and dur in microseconds; those of a track nest."""
    file = tmp_path / "trace.json.gz"
    assert trace.write(timeline, file) == len(made := json.loads(gzip.decompress(file.read_bytes()))["traceEvents"])
    spans = [event for event in made if event["ph"] == "X"]
    assert len(spans) == len(CONTROLLER) + len(POLICY) + len(GENERATOR)
    named = {(event["pid"], event["tid"]) for event in made if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} == named
    assert {event["args"]["name"] for event in made if event["name"] == "process_name"} == {
        "controller (1)", "generator-0-0 (1)", "policy-0 (1)",
    }  # fmt: skip
    assert_nests(spans)
    optim = next(event for event in spans if event["name"] == "policy.optim_step")
    assert (optim["ts"], optim["dur"], optim["cat"]) == (80_000, 14_000, "work")


def test_a_trace_that_cannot_be_written_is_said_with_its_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "timeline", "controller", [("step", "phase", 10, 19, 1, 0, {"step": 1})])
    file = tmp_path / "none" / "x.json"
    assert main.main(["timeline", str(tmp_path), "--trace", str(file)]) == 1
    assert f"--trace={file}: cannot be written (No such file or directory); give a file" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["step", "last"])
def test_a_trace_of_some_steps_is_refused(tmp_path, capsys, option):
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "timeline", "controller", [("step", "phase", 10, 19, 1, 0, {"step": 1})])
    assert main.main(["timeline", str(tmp_path), "--trace", str(tmp_path / "x.json"), f"--{option}", "1"]) == 1
    assert f"--{option}=1: a trace has every step; leave --{option} out, or --trace" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()


def assert_nests(spans):
    tracks = {}
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        open_until = tracks.setdefault((event["pid"], event["tid"]), [])
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        assert not open_until or event["ts"] + event["dur"] <= open_until[-1], event
        open_until.append(event["ts"] + event["dur"])


def test_the_report_names_shares_busy_processes_and_the_path(timeline):
    text = "\n".join(timeline_verb.report(timeline, timeline_verb.chosen(steps_of(timeline), 1, 10)))
    assert "step 1: 0.100 s a step; spans account for 93.0% or more of each" in text
    assert "0.036 s  36.0%  wait for policy.forward_backward" in text
    assert "42.0%  policy-0 (1)" in text
    assert "0.026 s  25.8%  generator-0-0: engine step x 2" in text


def test_what_is_not_there_is_said_in_a_sentence(tmp_path, timeline):
    with pytest.raises(ValueError, match=r"has no timeline; train with --record.timeline True"):
        Timeline.read(tmp_path / "none")
    with pytest.raises(ValueError, match=r"step=0: the timeline has steps 1 to 1; give one"):
        timeline_verb.chosen(steps_of(timeline), 0, 10)
    with pytest.raises(ValueError, match=r"last=0: must be at least 1"):
        timeline_verb.chosen(steps_of(timeline), None, 0)
    with pytest.raises(ValueError, match=r"no complete step"):
        timeline_verb.chosen([], None, 10)
    by_twos = [SimpleNamespace(number=number) for number in (1, 3, 5)]  # the last batch is of steps 5 and 6
    assert [step.number for step in timeline_verb.chosen(by_twos, 6, 10)] == [5]
    with pytest.raises(ValueError, match=r"step=7: the timeline has steps 1 to 6; give one"):
        timeline_verb.chosen(by_twos, 7, 10)
    one_was_filtered = [SimpleNamespace(number=number) for number in (1, 5, 6, 10, 14)]
    assert [step.number for step in timeline_verb.chosen(one_was_filtered, 16, 10)] == [14]
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "controller.1.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"controller.1.jsonl: is no timeline of a process"):
        Timeline.read(tmp_path / "bad")
    args = argparse.Namespace(run=str(tmp_path / "missing"), trace="", step=None, last=1)
    with pytest.raises(ValueError, match="is no directory"):
        timeline_verb.run(args)

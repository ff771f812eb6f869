"""Where metrics go beside metrics.jsonl: what readers of others read back, and what a sink that fails costs."""

import logging
import struct
import threading
import time
from functools import partial

import pytest
import wandb

from tests.recorded import RECORDED
from tests.wandb_files import history, records
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.overrides import apply_overrides
from torchtitan_rl.config.record import RecordConfig, WandbConfig
from torchtitan_rl.config.values import shell_text
from torchtitan_rl.record import attempts
from torchtitan_rl.record import recorder as recorder_module
from torchtitan_rl.record.background import BackgroundListener
from torchtitan_rl.record.curves import final_evaluations, phase_of, points
from torchtitan_rl.record.recorder import (
    DrawEvents,
    EvaluatedAttempts,
    GeneratorStarted,
    Listener,
    Metrics,
    Note,
    Published,
    Recorder,
    RolloutsEnded,
    TrainedOn,
    Warned,
)
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.run_dir_writer import RunDirWriter
from torchtitan_rl.record.sinks.fact_listener import FactListener
from torchtitan_rl.record.sinks.function import FunctionSink
from torchtitan_rl.record.sinks.tensorboard import TensorBoard
from torchtitan_rl.record.sinks.wandb import Wandb
from torchtitan_rl.validation.record import check_sinks

LINES = RunDir(RECORDED / "quickstart-seed0").read_metrics()
CONFIG = {"name": "quickstart", "trainer": {"optimizer": {"lr": 0.001}}}


def begun(path, lines=(), phase="", step=0):
    """A run's directory, begun again after `lines` where it holds any."""
    run_dir = RunDir(path) if path.exists() else RunDir.create(path)
    size = sum(len(line) + 1 for line in run_dir.metrics_file.read_text().splitlines()[: len(lines)])
    number = attempts.begin(run_dir, None, phase, step)
    attempts.cut_metrics(run_dir, size, number)
    return run_dir


def told(run_dir, listener, lines):
    recorder = Recorder([RunDirWriter(run_dir), listener])
    for line in lines:
        recorder.record(Metrics(line=line))
    recorder.close()


def curves(lines) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for line in lines:
        for name, value in points(line).items():
            found.setdefault(name, []).append((line["step"], value))
    return found


def test_curves_keep_phases_sets_and_splits_apart():
    line = {"step": 2, "phase": "reinforcement", "loss/mean": 0.5, "optim/skipped": 0}
    assert points(line) == {"loss/mean": 0.5, "optim/skipped": 0}
    for phase in ("supervised", "preference"):
        assert points(line | {"phase": phase}) == {f"{phase}/loss/mean": 0.5, f"{phase}/optim/skipped": 0}
    evaluation = {"step": 2, "phase": "evaluation", "eval/name": "sort", "eval/split": "test", "eval/accuracy": 1.0}
    assert points(evaluation | {"time/step_s": 2.0}) == {
        "eval/sort/test/accuracy": 1.0,
        "eval/sort/test/time/step_s": 2.0,
    }
    written = {"step": 2, "phase": "checkpoint", "checkpoint/name": "step-2", "time/write_s": 1.0}
    assert points(written | {"checkpoint/failed": 0}) == {"checkpoint/time/write_s": 1.0, "checkpoint/failed": 0}
    assert points(written | {"checkpoint/name": "supervised-2"}) == {"supervised/checkpoint/time/write_s": 1.0}
    assert points(written | {"checkpoint/name": "preference-2"}) == {"preference/checkpoint/time/write_s": 1.0}
    curves = ("preference/loss/mean", "supervised/loss/mean", "loss/mean", "eval/a/test/accuracy")
    assert [phase_of(curve) for curve in curves] == ["preference", "supervised", "reinforcement", "reinforcement"]
    assert points({"step": 2, "phase": "stop", "stop/reason": "target"}) == {}
    assert final_evaluations([evaluation, evaluation | {"step": 4}])[0]["step"] == 4


def read_tensorboard(path) -> tuple[dict, dict, dict]:
    """(curves, texts, pictures), by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    scalars, texts, images = {}, {}, {}
    for directory in sorted(path.iterdir()):
        events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
        events.Reload()
        tags = events.Tags()
        scalars |= {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags["scalars"]}
        texts |= {tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}
        images |= {tag: events.Images(tag)[-1].encoded_image_string for tag in tags["images"]}
    return scalars, texts, images


def float32(points):
    return [(step, struct.unpack("f", struct.pack("f", value))[0]) for step, value in points]


def test_tensorboards_reader_gives_back_the_runs_numbers(tmp_path):
    run_dir = begun(tmp_path / "run")
    told(run_dir, TensorBoard(run_dir.path, CONFIG, attempts.attempts(run_dir)[-1]), LINES)
    scalars, texts, images = read_tensorboard(run_dir.path / "tensorboard")
    expected = curves(LINES)
    assert scalars.keys() == expected.keys() and len(scalars) > 40
    assert scalars == {name: float32(points) for name, points in expected.items()}
    assert '"lr": 0.001' in texts["config/text_summary"]
    test = next(line for line in LINES if line.get("eval/split") == "test")
    assert f"| eval/letter_sort/test/accuracy | {test['eval/accuracy']} |" in texts["final evaluation/text_summary"]
    assert images["curve"] == (run_dir.path / "curve.png").read_bytes()


def test_a_fork_tells_tensorboard_its_config(tmp_path):
    """A fork has the attempts of its parent."""
    run_dir = begun(tmp_path / "run")
    forked = attempts.attempts(run_dir)[-1] | {"attempt": 2, "phase": "reinforcement", "step": 4}
    told(run_dir, TensorBoard(run_dir.path, CONFIG, forked), LINES)
    _, texts, _ = read_tensorboard(run_dir.path / "tensorboard")
    assert '"lr": 0.001' in texts["config/text_summary"]


def test_tensorboard_forgets_the_steps_that_are_taken_again(tmp_path):
    path = tmp_path / "run"
    kept = next(i for i, line in enumerate(LINES) if line["phase"] == "reinforcement" and line["step"] == 5)
    again = [line | {"reward/mean": 7.0} if "reward/mean" in line else line for line in LINES[kept:]]
    for lines, before, phase, step in ((LINES, [], "", 0), (again, LINES[:kept], "reinforcement", 4)):
        run_dir = begun(path, before, phase, step)
        # TensorBoard reads files in the order of their names, in which seconds come first.
        time.sleep(1 - time.time() % 1)
        told(run_dir, TensorBoard(path, CONFIG, attempts.attempts(run_dir)[-1]), lines)
    scalars, _, _ = read_tensorboard(path / "tensorboard")
    expected = curves(RunDir(path).read_metrics())
    assert scalars == {name: float32(points) for name, points in expected.items()}
    assert [value for _, value in scalars["reward/mean"][-2:]] == [7.0, 7.0]
    assert len(scalars["supervised/loss/mean"]) == 12  # steps 5 to 12 of the other phase are not taken again


def test_tensorboard_forgets_a_supervised_phase_that_is_gone_through_again(tmp_path):
    path = tmp_path / "run"
    for lines, before, phase, step in ((LINES, [], "", 0), (LINES[4:], LINES[:4], "supervised", 4)):
        run_dir = begun(path, before, phase, step)
        # TensorBoard reads files in the order of their names, in which seconds come first.
        time.sleep(1 - time.time() % 1)
        told(run_dir, TensorBoard(path, CONFIG, attempts.attempts(run_dir)[-1]), lines)
    scalars, _, _ = read_tensorboard(path / "tensorboard")
    assert scalars == {name: float32(points) for name, points in curves(LINES).items()}


def read_wandb(file) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for row in history(file)[:-1]:  # the last one is the picture
        supervised = any(name.startswith("supervised/") for name in row)
        step = row["supervised/step" if supervised else "step"]
        for name, value in row.items():
            if name not in ("step", "supervised/step", "attempt"):
                found.setdefault(name, []).append((step, value))
    return found


def test_wandbs_offline_directory_gives_back_the_runs_numbers_and_a_resumed_run_is_the_same_one(tmp_path):
    path = tmp_path / "run"
    for lines, before, phase, step in ((LINES, [], "", 0), (LINES[-3:], LINES[:-3], "reinforcement", 8)):
        run_dir = begun(path, before, phase, step)
        sink = Wandb(path, CONFIG, run_dir.attempt, project="p", entity="", group="g", mode="offline")
        told(run_dir, sink, lines)
    wandb.teardown()  # `finish` may return before W&B's own process has written the last of an offline run
    first, second = sorted(path.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.parent.name)
    assert first.name == second.name
    assert read_wandb(first) == curves(LINES) and read_wandb(second) == curves(LINES[-3:])
    assert {row["attempt"] for row in history(second)[:-1]} == {2}
    assert history(second)[-1]["curve/_type"] == "image-file"
    of_kind = {}
    for record in records(first):
        of_kind.setdefault(record.WhichOneof("record_type"), []).append(record)
    (run,) = of_kind["run"]
    assert (run.run.project, run.run.run_group, run.run.display_name) == ("p", "g", "run")
    assert {item.key: item.value_json for item in run.run.config.update}["name"] == '"quickstart"'
    summary = {item.key: item.value_json for record in of_kind["summary"] for item in record.summary.update}
    test = next(line for line in LINES if line.get("eval/split") == "test")
    assert float(summary["final/letter_sort/test/accuracy"]) == test["eval/accuracy"]
    axes = {record.metric.name: record.metric.step_metric for record in of_kind["metric"]}
    assert axes["supervised/loss/mean"] == "supervised/step" and axes["loss/mean"] == "step"
    assert len(list(first.parent.glob("files/media/images/curve*.png"))) == 1


def test_a_function_is_called_with_copies_of_the_lines_in_order():
    heard = []

    def sink(line):
        heard.append(dict(line))
        line.clear()

    recorder = Recorder([BackgroundListener(FunctionSink(sink), "mine", events=(Metrics,))])
    lines = [dict(line) for line in LINES]
    for line in lines:
        recorder.record(Metrics(line=line))
        recorder.record(Note(text="not for sinks"))
    recorder.close()
    assert heard == LINES == lines


class Sleeps(Listener):
    def metrics(self, event):
        time.sleep(60)


class Cannot(Listener):
    def __init__(self):
        raise OSError("no such host")


class CannotEnd(Listener):
    def close(self):
        time.sleep(60)


class Leaves(Listener):
    def metrics(self, event):
        raise SystemExit


def broken(line):
    raise KeyError("reward")


@pytest.mark.parametrize(
    "sink, expected",
    [
        (FunctionSink(broken), ["mine: KeyError: 'reward'; the run goes on, and metrics.jsonl has every number"]),
        (Sleeps(), ["mine: has been busy with one event for 0.1 s", "mine: is still busy at the run's end; it is"]),
        (Cannot, ["mine: could not start: OSError: no such host"]),
        (CannotEnd(), ["mine: is still busy at the run's end; it is given up"]),
        (Leaves(), ["mine: SystemExit: "]),
    ],
)
def test_a_sink_that_fails_or_hangs_is_reported_once_and_delays_nothing(sink, expected, caplog, tmp_path):
    run_dir = begun(tmp_path / "run")
    other = []
    aside = BackgroundListener(sink, "mine", patience_s=0.1)
    recorder = Recorder([RunDirWriter(run_dir), aside, BackgroundListener(FunctionSink(other.append), "other")])
    with caplog.at_level(logging.WARNING):
        began = time.monotonic()
        for line in LINES:
            recorder.record(Metrics(line=line))
        slept = time.monotonic() - began
        time.sleep(0.15)
        recorder.record(Metrics(line=LINES[-1]))
        began = time.monotonic()
        recorder.close()
        closing = time.monotonic() - began
    assert slept < 1.0 and closing < 1.0
    assert len(caplog.messages) == len(expected)
    assert all(text in message for text, message in zip(expected, caplog.messages))
    assert run_dir.read_metrics() == other == [*LINES, LINES[-1]]


def test_a_sink_that_was_busy_before_the_end_has_the_same_patience_as_any_other():
    received, goes_on = [], threading.Event()

    def sink(line):
        goes_on.wait(60)
        received.append(line)

    aside = BackgroundListener(FunctionSink(sink), "mine", patience_s=0.5)
    for line in LINES:
        aside.metrics(Metrics(line=line))
    time.sleep(0.6)
    threading.Timer(0.1, goes_on.set).start()
    aside.close()
    aside.wait()
    assert received == LINES


def test_a_sink_that_is_too_slow_loses_events_and_takes_no_memory(caplog):
    aside = BackgroundListener(Sleeps(), "slow", room=3, patience_s=30)
    for line in LINES[:10]:
        aside.metrics(Metrics(line=line))
    assert aside._events.qsize() <= 3
    assert [message for message in caplog.messages if "is 3 events behind" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_sinks_in_a_config_are_checked_before_a_run():
    check_sinks(
        RecordConfig(tensorboard=True, wandb=WandbConfig(), sinks=[print, broken, Sleeps, partial(print, "line")])
    )
    for record, message in (
        (RecordConfig(sinks=["x"]), "record.sinks: holds a str"),
        (RecordConfig(sinks=[Sleeps()]), "name its class"),
        (RecordConfig(sinks=[lambda: None]), "cannot be called as .line."),
        (RecordConfig(sinks=[type("Needs", (Listener,), {"__init__": lambda self, url: None})]), "as ()"),
    ):
        with pytest.raises(ValueError, match=message.replace("()", r"\(\)")):
            check_sinks(record)


def test_a_missing_package_is_a_sentence(monkeypatch):
    monkeypatch.setattr("torchtitan_rl.validation.record.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"record.tensorboard: the package tensorboard is not installed; scripts/setup"
    ):
        check_sinks(RecordConfig(tensorboard=True))


def test_sinks_are_a_flag():
    config = load_config(str(RECORDED.parents[1] / "configs" / "quickstart.py"))
    name = "torchtitan_rl.record.sinks.function:FunctionSink"
    apply_overrides(config, ["--record.sinks", name, "--record.wandb.project", "letters", "--record.tensorboard"])
    assert config.record == RecordConfig(tensorboard=True, wandb=WandbConfig(project="letters"), sinks=[FunctionSink])
    assert shell_text(config.record.sinks) == name
    apply_overrides(config, ["--record.sinks", "[]", "--record.wandb", "None"])
    assert config.record.sinks == [] and config.record.wandb is None


class Former(Listener):
    """A listener as users wrote it before there was a method for each event."""

    def __init__(self):
        self.facts = []

    def fact(self, kind, fields):
        self.facts.append((kind, fields))


EVENTS = [
    (Metrics(line={"step": 1}), "metrics"),
    (TrainedOn(sequences=[]), "trained"),
    (RolloutsEnded(step=1, groups=[]), "rollouts"),
    (EvaluatedAttempts(step=1, records=[]), "evaluated"),
    (DrawEvents(step=1, records=[]), "draws"),
    (Published(step=1, version=2, seconds=0.5), "version"),
    (Note(text="a"), "note"),
    (GeneratorStarted(client=None), "generator"),
    (Warned(at="", level="warning", kind="warning", who="", text="a"), "event"),
]


def test_a_listener_with_the_former_method_hears_of_every_event():
    with pytest.warns(DeprecationWarning, match="listeners have a method per event now"):
        listener = FactListener(Former)
    for event, _ in EVENTS:
        event.deliver(listener)
    assert [kind for kind, _ in listener._listener.facts] == [kind for _, kind in EVENTS]
    assert listener._listener.facts[3] == ("evaluated", {"step": 1, "records": []})
    delivered = {each for each in vars(recorder_module).values() if isinstance(each, type) and "deliver" in vars(each)}
    assert delivered - {recorder_module.Event} == {type(event) for event, _ in EVENTS}

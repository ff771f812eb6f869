"""Whether a run is well, from its files alone."""

import json
import shutil
from datetime import datetime, timedelta

import pytest

from tests.kit.runs import made_run
from torchtitan_rl.health.diagnosis import examine
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.health import health_of
from torchtitan_rl.tools.series import Series


@pytest.fixture
def run_dir(tmp_path):
    return made_run(tmp_path / "run")


def ago(seconds):
    return (datetime.now().astimezone() - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def put(run_dir, age=0.0, **more):
    status = {"at": ago(age), "heartbeat_s": 5.0, "pid": 7, "host": "here", "attempt": 1}
    status |= {"phase": "reinforcement", "step": 3, "num_steps": 10, "spans": [], "ended": ""}
    status |= {"replicas": {"generator-0": "healthy"}}
    (run_dir.path / "status.json").write_text(json.dumps(status | more))


def look(run_dir):
    run = Run(run_dir)
    return health_of(run, Series(run_dir.metrics_file).refresh(), examine(run).findings)


def overdue(run_dir):
    """What the rule on the present work says."""
    return [finding.what for finding in examine(Run(run_dir)).findings if finding.rule == "overdue"]


def test_a_run_that_reports_is_running_and_well(run_dir):
    put(run_dir)
    health = look(run_dir)
    assert (health.state, health.good, health.missing, health.num_attempts) == ("running", True, [], 1)


def test_a_lost_replica_and_a_late_span_are_not_well(run_dir):
    put(run_dir, replicas={"generator-0": "its process has ended"})
    assert not look(run_dir).good
    put(run_dir, spans=[{"name": "generate", "since": ago(40), "done": 0, "total": 0}])
    assert overdue(run_dir) == []  # nobody knows how long it takes
    put(run_dir, spans=[{"name": "step", "since": ago(40), "done": 0, "total": 0}])
    assert (
        look(run_dir).sentence == "step"
        and overdue(run_dir) == ["step has taken 40 s so far; usually 1.0 s"]
        and not look(run_dir).good
    )


def test_a_process_that_is_gone_has_died_and_one_that_says_nothing_is_silent(run_dir):
    put(run_dir, age=1)
    with attempts.locked(run_dir):
        assert look(run_dir).state == "running"
        put(run_dir, age=14)
        assert (look(run_dir).state, look(run_dir).good) == ("silent", False)
        attempts.unlock(run_dir)
    put(run_dir, age=1)
    assert look(run_dir).state == "died"  # at once: nobody holds the lock
    (run_dir.path / "run.lock").write_text("pid 7 on elsewhere")
    assert look(run_dir).state == "running"
    put(run_dir, age=60)
    assert look(run_dir).state == "died"


def test_ends_are_told_with_their_reason(run_dir):
    put(run_dir, ended="finished")
    assert look(run_dir).state == "finished" and look(run_dir).good
    put(run_dir, ended="stopped")
    attempts.end_for_good(run_dir, "the filters left nothing")
    health = look(run_dir)
    assert health.state == "stopped" and health.sentence.endswith(": the filters left nothing")


def test_events_are_newest_first_and_counted(run_dir):
    for kind in ("replica_lost", "rollout_failed", "rollout_failed"):
        run_dir.record("events", 2, [{"at": ago(3), "level": "warning", "kind": kind, "who": "x", "text": "t"}])
    health = look(run_dir)
    assert health.counts == {"rollout_failed": 2, "replica_lost": 1} and health.events[-1]["kind"] == "replica_lost"


@pytest.mark.parametrize(
    "status",
    ["", '{"at": "2026', "[]", '{"at": 3, "spans": [1], "replicas": [], "pid": "x"}', '{"spans": 7}', "[" * 50_000],
)
def test_half_a_status_is_named(run_dir, status):
    (run_dir.path / "status.json").write_text(status)
    (run_dir.path / "events").mkdir()
    (run_dir.path / "events" / "000001.jsonl").write_text("?\n")
    health = look(run_dir)
    assert health.state == "unknown" and not health.good and any("events/" in what for what in health.missing)


def test_files_that_are_nested_too_deep_are_no_json(run_dir):
    for name in ("config.json", "ended.json"):
        (run_dir.path / name).write_text("[" * 50_000)
    put(run_dir)
    health = look(run_dir)
    assert health.state == "running" and "config.json is missing or cut off" in health.missing
    assert attempts.reason_of_end(run_dir) == "ended.json does not say, it was cut off; the log does"


def test_an_empty_directory_says_what_is_missing(tmp_path):
    run_dir = Run.open(tmp_path).directory
    health = look(run_dir)
    assert health.state == "waiting" and len(health.missing) == 3 and not health.good
    shutil.rmtree(tmp_path)
    assert look(run_dir).state == "waiting"
    (RunDir.create(tmp_path).path / "status.json").touch()
    assert look(run_dir).state == "unknown"


@pytest.mark.parametrize(
    "kind, text", [("run_failed", "task='a': the judge is tired"), ("interrupted", "asked to end")]
)
def test_a_stopped_run_says_why_by_its_last_event(run_dir, kind, text):
    put(run_dir, ended="stopped")
    run_dir.attempt = 1
    run_dir.record("events", 2, [{"at": ago(3), "level": "error", "kind": kind, "who": "", "text": text}])
    assert look(run_dir).sentence.endswith(f" ago: {text}")
    put(run_dir, ended="stopped", attempt=2)  # a later attempt: that event is not about its end
    assert text not in look(run_dir).sentence


def test_a_run_that_ended_early_says_by_which_rule(run_dir):
    put(run_dir, ended="finished")
    run_dir.log_metrics({"step": 3, "phase": "stop", "stop/reason": "controller.stop.patience=2: no better"})
    assert look(run_dir).sentence.endswith(" ago, early: controller.stop.patience=2: no better")
    run_dir.log_metrics({"step": 4, "phase": "reinforcement", "reward/mean": 1.0})  # resumed, without that rule
    assert "early" not in look(run_dir).sentence

"""The rules during training: what is found is said once, as a warning; samples say what processes hold."""

import logging
import math
import os
import socket
import subprocess
from types import SimpleNamespace

import pytest

from tests.kit.clock import Clock
from torchtitan_rl.dispatch.router import Router
from torchtitan_rl.health.samples import Samples
from torchtitan_rl.health.watch import HealthWatch
from torchtitan_rl.record.recorder import GeneratorStarted, Metrics, RolloutsEnded
from torchtitan_rl.record.run_dir import RunDir


@pytest.fixture
def run_dir(tmp_path):
    run_dir = RunDir.create(tmp_path / "run")
    run_dir.write_config({})
    return run_dir


def trained(watch, *fractions, phase="reinforcement", **more):
    """Batches with these shares of groups without signal."""
    for fraction in fractions:
        step = watch._step + 1
        line = {"step": step, "phase": phase, "reward/zero_std_frac": fraction, "reward/mean": 0.2, **more}
        watch.metrics(Metrics(line=line))
        watch.rollouts(RolloutsEnded(step=step, groups=[]))


def test_what_is_found_is_said_once(run_dir, caplog):
    watch = HealthWatch(run_dir, {}, pace_s=0)
    with caplog.at_level(logging.WARNING):
        trained(watch, *[0.95] * 9, 0.5, *[0.95] * 9)
        assert caplog.messages == []
        trained(watch, *[0.95] * 30)
    (record,) = caplog.records
    assert "for 10 batches the rewards of at least 90% of the groups have been equal" in record.message
    assert "grade the reward" in record.message and (record.event, record.who) == ("finding", "no_signal")


def test_thresholds_of_the_config_hold(run_dir, caplog):
    trained(HealthWatch(run_dir, {"no_signal": 0.97}, pace_s=0), *[0.95] * 30)
    trained(HealthWatch(run_dir, {"truncation": 0.1}, pace_s=0), *[0.1] * 30, **{"completion/truncated_frac": 0.2})
    assert [record.who for record in caplog.records] == ["truncation"]


def test_answers_are_looked_at(run_dir, caplog):
    watch = HealthWatch(run_dir, {}, pace_s=0)
    groups = [
        SimpleNamespace(
            id=f"{i}/0",
            rollouts=[SimpleNamespace(task=SimpleNamespace(id=f"t{i}"), text="", reward=0.0, reward_parts={})] * 4,
        )
        for i in range(10)
    ]
    for step in range(1, 6):
        watch.rollouts(RolloutsEnded(step=step, groups=groups))
    assert {record.who for record in caplog.records} == {"duplicates", "unparsable"}


def test_between_two_looks_some_time_passes_and_the_end_is_looked_at(run_dir, caplog):
    watch = HealthWatch(run_dir, {}, pace_s=3600)
    trained(watch, *[0.95] * 30)
    assert caplog.messages == []
    watch.close()
    assert [record.who for record in caplog.records] == ["no_signal"]


def test_a_long_run_takes_no_more_time_or_memory(run_dir):
    watch = HealthWatch(run_dir, {}, pace_s=0)
    trained(watch, *[0.1] * 500)
    assert (
        len(watch._first) + len(watch._last) == 80 and watch._first[0]["step"] == 1 and watch._last[-1]["step"] == 500
    )


def test_a_resumed_run_remembers_how_it_began(run_dir, caplog):
    for step in range(1, 11):
        run_dir.log_metrics({"step": step, "phase": "reinforcement", "policy/entropy": 1.0, "reward/mean": 0.2})
    watch = HealthWatch(run_dir, {}, pace_s=0)
    trained(watch, *[0.1] * 10, **{"policy/entropy": 0.01})
    assert [record.who for record in caplog.records] == ["entropy_collapse"]


def test_first_steps_after_a_resume_may_be_slow(run_dir, caplog):
    for step in range(1, 11):
        run_dir.log_metrics({"step": step, "phase": "reinforcement", "time/step_s": 0.3})
    run_dir.record("attempts", 10, [{"phase": "reinforcement"}])
    watch = HealthWatch(run_dir, {}, pace_s=0)
    for step in range(11, 20):
        line = {"step": step, "phase": "reinforcement", "time/step_s": 8.0 if step == 11 else 0.3}
        watch.metrics(Metrics(line=line))
        watch.rollouts(RolloutsEnded(step=step, groups=[]))
    assert caplog.messages == []


def test_a_quarter_of_a_long_run_is_a_quarter_of_all_its_batches(run_dir, caplog):
    watch = HealthWatch(run_dir, {}, pace_s=0)
    for step in range(1, 301):
        late = step > 260
        line = {"step": step, "reward/zero_std_frac": 0.9 if late else 0.1, "reward/mean": 0.99 if late else 0.5}
        watch.metrics(Metrics(line={"phase": "reinforcement", **line}))
        watch.rollouts(RolloutsEnded(step=step, groups=[]))
    assert "saturation" not in {record.who for record in caplog.records}


def test_a_long_run_that_is_saturated_is_told_so(run_dir, caplog):
    watch = HealthWatch(run_dir, {}, pace_s=0)
    for step in range(1, 401):
        late = step > 300
        line = {"step": step, "reward/zero_std_frac": 0.95 if late else 0.1, "reward/mean": 0.99 if late else 0.5}
        watch.metrics(Metrics(line={"phase": "reinforcement", **line}))
        watch.rollouts(RolloutsEnded(step=step, groups=[]))
    (record,) = caplog.records
    assert record.who == "saturation" and "in 99 batches since step 301" in record.message


def test_accuracy_that_falls_is_compared_with_the_reward_of_its_best_step(run_dir, caplog):
    watch = HealthWatch(run_dir, {}, pace_s=0)
    for step in range(1, 301):
        line = {"step": step, "phase": "reinforcement", "reward/mean": 0.2 if step < 150 else 0.5}
        watch.metrics(Metrics(line=line))
        watch.rollouts(RolloutsEnded(step=step, groups=[]))
        if step in (100, 300):
            ends = {"eval/accuracy_ci95_low": 0.55, "eval/accuracy_ci95_high": 0.4}
            evaluation = {"step": step, "phase": "evaluation", "eval/name": "sort", "eval/split": "validation"}
            watch.metrics(Metrics(line={**evaluation, "eval/accuracy": 0.6 if step == 100 else 0.3, **ends}))
    (record,) = caplog.records
    assert record.who == "eval_falls" and "while the reward rose from 0.200 to 0.500" in record.message


@pytest.mark.parametrize("phase", ["supervised", "preference"])
@pytest.mark.parametrize("bad", [{"optim/skipped": 1}, {"loss/mean": math.nan}], ids=["skipped", "loss"])
def test_steps_of_the_phases_before_are_looked_at(phase, bad, run_dir, caplog):
    watch = HealthWatch(run_dir, {}, pace_s=0)
    for step in range(1, 100):
        watch.metrics(Metrics(line={"step": step, "phase": phase, "loss/mean": 0.1} | (bad if step == 7 else {})))
        assert len(caplog.records) == (step >= 7)
    (record,) = caplog.records
    assert record.who == "steps_skipped" and "the first at step 7" in record.message


def test_an_attempt_that_began_in_another_phase_excuses_no_slow_step(run_dir, caplog):
    run_dir.record("attempts", 14, [{"phase": "supervised"}])
    watch = HealthWatch(run_dir, {}, pace_s=0)
    for step in range(1, 20):
        line = {"step": step, "phase": "reinforcement", "time/step_s": 9.0 if step == 15 else 0.3}
        watch.metrics(Metrics(line=line))
        watch.rollouts(RolloutsEnded(step=step, groups=[]))
    assert [record.who for record in caplog.records] == ["slow_step"]


def test_samples_have_memory_and_times(run_dir, caplog):
    watch = HealthWatch(run_dir, {}, pace_s=0)
    router = Router(2)
    client = SimpleNamespace(request_times=lambda: {"generator-0": router.times()[0]})
    watch.generator_started(GeneratorStarted(client=client))
    first, *_ = records = list(run_dir.tables["samples"].read())
    assert (first["who"], first["pid"]) == ("controller", os.getpid()) and first["rss_mib"] > 10
    assert (records[-1]["who"], records[-1]["in_flight_s"], records[-1]["answered"]) == ("generator-0", 0.0, 0)
    assert caplog.messages == []


def test_samples_become_rarer(tmp_path, monkeypatch):
    clock, times = Clock(), []
    samples = Samples(tmp_path, clock=clock)
    monkeypatch.setattr(samples, "_processes_by_name", dict)
    while clock.now < 36_000:
        if samples.due():
            samples.take()
            times.append(clock.now)
        clock.now += 0.5
    assert times[:3] == [0.0, 1.0, 2.0] and times[-1] - times[-2] == 30.0
    assert len(times) < 1800  # of ten hours


def test_a_process_that_starts_is_found_when_told(tmp_path):
    samples = Samples(tmp_path)
    assert "controller" in {record["who"] for record in samples.take()}
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert not samples.due()
        samples.look_again()
        assert samples.due() and f"pid-{child.pid}" in {record["who"] for record in samples.take()}
    finally:
        child.kill(), os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # has ended; its parent has not asked yet
        assert f"pid-{child.pid}" not in {record["who"] for record in samples.take()}
        child.wait()
        assert f"pid-{child.pid}" not in {record["who"] for record in samples.take()}


def test_processes_are_named_after_their_logs(tmp_path):
    line = "2026-01-01 INFO x: generator-1 rank 0 of 1, pid 77, host {}, device cpu\n"
    (tmp_path / "generator-1-0.log").write_text(line.format(socket.gethostname()) + "more\n" * 50_000)
    (tmp_path / "policy-0.log").write_text(line.format("elsewhere").replace("77", "78"))
    assert Samples(tmp_path)._names() == {77: "generator-1-0"}


def test_a_router_sums_up_the_time_of_requests():
    clock = Clock()
    router = Router(2, clock=clock)
    state = {"serving": [0, 1], "loaded_versions": [1, 1], "newest": 1}
    assert router.route([[1], [2]], None, **state) == [0, 1]
    clock.now = 2.0
    router.finished(0, 1, None)
    clock.now = 5.0
    assert router.times() == [(2.0, 1), (5.0, 0)]
    router.finished(1, 1, None)
    clock.now = 9.0
    assert router.times() == [(2.0, 1), (5.0, 1)]

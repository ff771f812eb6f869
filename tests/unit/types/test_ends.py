"""When a run stops after the present step."""

from tests.kit.clock import Clock
from torchtitan_rl.types.ends import StopRequest


def test_a_run_goes_on_until_somebody_asks(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    stop = StopRequest(0.0, clock=Clock(1000.0))
    assert stop.reason() == ""
    stop.ask("SIGTERM")
    assert stop.reason() == stop.requested_reason == "SIGTERM"


def test_the_last_step_that_fits_into_the_limit_is_taken(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    clock = Clock(1000.0)
    stop = StopRequest(0.1, clock=clock)  # 360 s
    clock.now += 170
    assert stop.reason() == ""  # another 170 s would end after 340 s
    clock.now += 100
    assert stop.reason() == "controller.max_hours=0.1 leaves no time for another step"  # 270 s + 100 s
    clock.now += 10
    assert stop.reason() == ""  # 280 s + 10 s


def test_evaluations_after_a_step_count_as_part_of_it(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    clock = Clock(1000.0)
    stop = StopRequest(0.1, clock=clock)  # 360 s
    clock.now += 100
    assert stop.reason(step_goes_on=True) == ""
    clock.now += 90
    assert stop.reason() == "controller.max_hours=0.1 leaves no time for another step"  # 190 s + 190 s


def test_the_end_of_a_slurm_job_is_a_limit(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1100")
    clock = Clock(5.0)
    stop = StopRequest(0.0, clock=clock, wall_clock=Clock(1000.0))
    clock.now += 40
    assert stop.reason() == ""
    clock.now += 40
    assert stop.reason() == "the Slurm job's time limit leaves no time for another step"


def test_evaluations_that_take_longer_than_a_step_are_begun_only_where_they_end_in_time(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    clock = Clock(1000.0)
    stop = StopRequest(0.1, clock=clock)  # 360 s
    stop.evaluation_s = 300.0
    clock.now += 50
    assert stop.reason(step_goes_on=True) == stop.reason() == ""  # 50 s + 300 s; a step: 50 s + 50 s
    clock.now += 20
    assert stop.reason(step_goes_on=True) == "controller.max_hours=0.1 leaves no time for another step"  # 70 s + 300 s
    assert stop.reason() == ""

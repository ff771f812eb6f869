"""What a replay refuses before anything starts, in a sentence."""

import json

import pytest

from tests.kit.runs import made_run
from torchtitan_rl.record import attempts
from torchtitan_rl.record.schedule import ScheduleFile, schedule_of, write_environment
from torchtitan_rl.train.recorded_attempt import recorded_attempt


@pytest.fixture
def run(tmp_path):
    """A run of three steps, with a schedule of one engine."""
    run_dir = made_run(tmp_path / "run")
    run_dir.record("ledger", 1, [{"draw": f"{slot}/0", "event": "trained"} for slot in (3, 2)])
    run_dir.record("ledger", 2, [{"draw": "5/0", "event": "filtered"}, {"draw": "5/1", "event": "trained"}])
    directory = schedule_of(run_dir.path, 1)
    ScheduleFile(str(directory), "generator-0").close()
    write_environment(directory, {"cores": 2})
    return run_dir


def test_an_attempt_is_read_with_its_batches(run):
    recorded = recorded_attempt(run.path, first=None, last=2)
    assert (recorded.number, recorded.first, recorded.last, recorded.checkpoint) == (1, 0, 2, None)
    assert recorded.batches == [[2, 3], [5]] and recorded.environment == {"cores": 2}
    schedules = recorded.schedules(run.path / "elsewhere", None)
    assert schedules.followed == {"generator-0": str(schedule_of(run.path, 1) / "generator-0-1.jsonl")}


def test_an_engine_that_was_replaced_and_its_replacement_are_followed_by_a_replica_each(run):
    ScheduleFile(str(schedule_of(run.path, 1)), "generator-0").close()
    recorded = recorded_attempt(run.path, first=None, last=None)
    files = recorded.schedules(run.path / "elsewhere", None).followed
    assert recorded.num_engines == 2 and list(files) == ["generator-0", "generator-1"]
    assert files["generator-1"].endswith("generator-0-2.jsonl")


def test_the_attempt_that_trained_the_last_step_is_replayed_from_its_checkpoint(run):
    attempts.begin(run, "step-2", "reinforcement", 2)
    ScheduleFile(str(schedule_of(run.path, 2)), "generator-0").close()
    assert recorded_attempt(run.path, first=None, last=2).number == 1
    with pytest.raises(ValueError, match=r"checkpoint='.*step-2': is missing; replay from another one"):
        recorded_attempt(run.path, first=None, last=3)
    with pytest.raises(ValueError, match=r"--from=1: step 3 was trained by attempt 2, which began after step 2"):
        recorded_attempt(run.path, first=1, last=3)


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        (None, 9, r"--to=9: no batch of the run ended at that step; give one of 1, 2, 3"),
        (3, 3, r"--from=3: step 3 was trained by attempt 1, which began after step 0; give .* from 0 to 2"),
        (1, 3, r"checkpoint='.*step-1': is missing"),
    ],
)
def test_unknown_steps_are_refused(run, first, last, message):
    with pytest.raises(ValueError, match=message):
        recorded_attempt(run.path, first=first, last=last)


def test_a_run_without_a_schedule_is_refused(run, tmp_path):
    bare = made_run(tmp_path / "bare").path
    with pytest.raises(ValueError, match=r"attempt 1 has no schedule; runs record one from this version on"):
        recorded_attempt(bare, first=None, last=None)
    with pytest.raises(ValueError, match="is no run directory"):
        recorded_attempt(tmp_path, first=None, last=None)


def test_a_checkpoint_in_the_middle_is_refused_at_a_lag(run):
    run.config_file.write_text(json.dumps({"algorithm": {"max_policy_lag": 2}}))
    with pytest.raises(ValueError, match=r"--from=1: with algorithm.max_policy_lag=2 requests are under way"):
        recorded_attempt(run.path, first=1, last=3)

"""What a replay refuses before anything starts, in a sentence."""

import dataclasses
import json
from pathlib import Path

import pytest

from tests.kit.runs import made_run
from torchtitan_rl.config import ExpertsShape
from torchtitan_rl.config.load import load_config
from torchtitan_rl.record import attempts
from torchtitan_rl.record.schedule import ScheduleFile, UnderWay, schedule_of, write_environment
from torchtitan_rl.train.recorded_attempt import check_company, recorded_attempt
from torchtitan_rl.types import Request, SamplingParams
from torchtitan_rl.weights import checkpoint

QUICKSTART = load_config(str(Path(__file__).parents[3] / "configs" / "quickstart.py"))
MOE = dataclasses.replace(QUICKSTART.model.shape, experts=ExpertsShape(num_experts=4, top_k=2))


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


@pytest.fixture
def lagged(run):
    """The same run at a lag of 1, with a checkpoint after step 1, at which one request was under way."""
    config = {"algorithm": {"max_policy_lag": 1}, "controller": {"num_steps": 3}}
    run.config_file.write_text(json.dumps(config))
    path = run.checkpoint_path(1)
    checkpoint.begin(checkpoint.beside(path))
    checkpoint.commit(checkpoint.beside(path), path, {"policy_version": 1}, {})
    return run


def schedule(run, *, version=1, **of_request):
    directory = schedule_of(run.path, 1)
    for file in directory.glob("*.jsonl"):
        file.unlink()
    file = ScheduleFile(str(directory), "generator-0")
    fields = {"number": 3, "num_tokens": 9, "num_computed": 8, "temperature": 1.0} | of_request
    file.loaded(4, 1, version, "00000001", ["norm"], [UnderWay(**fields)])
    file.close()


def rollout(run, turns):
    run.record("rollouts", 2, [{"rollout_id": "5/0/0", "turns": turns}])


TURN = {
    "seed": 7,
    "num_prompt_tokens": 2,
    "finish_reason": "stop",
    "tokens": [5, 1],
    "logprobs": [-0.5, -0.25],
    "policy_versions": [0, 1],
}


def test_at_a_lag_a_replay_begins_with_the_load_of_the_checkpoint_and_the_records_answers(lagged):
    schedule(lagged), rollout(lagged, [TURN])
    recorded = recorded_attempt(lagged.path, first=1, last=2)
    assert (recorded.first, recorded.served, recorded.batches) == (1, 1, [[5]])
    assert recorded.schedules(lagged.path / "elsewhere", None).after_load == 1
    request = Request([3, 4], SamplingParams(max_tokens=4, seed=7))
    answer = recorded.answers.take(request)
    assert (answer.tokens, answer.logprobs, answer.policy_versions) == ([5, 1], [-0.5, -0.25], [0, 1])
    assert recorded.answers.take(request) is None  # once


def test_at_a_lag_a_replay_without_from_samples_everything(lagged):
    recorded = recorded_attempt(lagged.path, first=None, last=2)
    assert recorded.answers is None and recorded.schedules(lagged.path / "elsewhere", None).after_load is None


@pytest.mark.parametrize(
    ("of_request", "turns", "message"),
    [
        ({"temperature": None}, [TURN], r"--from=1: request 3 was scored, .*; give another checkpoint"),
        ({}, None, r"--from=1: requests were under way, and controller.record_tokens=False has kept no tokens of them"),
        ({"version": 0}, [TURN], r"--from=1: no engine has loaded version 1; leave --from out"),
    ],
)
def test_what_the_record_does_not_have_of_requests_under_way_is_refused(lagged, of_request, turns, message):
    schedule(lagged, **of_request), rollout(lagged, turns)
    with pytest.raises(ValueError, match=message):
        recorded_attempt(lagged.path, first=1, last=2)


def test_a_checkpoint_whose_requests_under_way_have_not_trained_is_refused(lagged):
    lagged.config_file.write_text(json.dumps({"algorithm": {"max_policy_lag": 2}, "controller": {"num_steps": 9}}))
    schedule(lagged)
    with pytest.raises(
        ValueError, match=r"--from=1: what was under way then trained in the 2 batches after it, of which"
    ):
        recorded_attempt(lagged.path, first=1, last=2)


def test_a_replay_that_began_with_requests_under_way_is_refused(lagged):
    write_environment(schedule_of(lagged.path, 1), {"after_load": 4})
    with pytest.raises(ValueError, match="is a replay that began at a checkpoint with requests under way"):
        recorded_attempt(lagged.path, first=None, last=2)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("generator.on_update", "recompute", "the new weights read all tokens"),
        ("generator.async_scheduling", True, "a request that ends has a row of the next step too"),
        ("generator.max_adapters", 2, "whose adapters requests under way had"),
        ("record.explain_mismatch_every", 2, "scores are not recorded"),
        ("algorithm.greedy_baseline", True, "greedy completions, which are not recorded"),
        ("model.shape", MOE, "a mixture of experts"),
    ],
)
def test_engines_that_cannot_go_on_in_company_are_refused(path, value, message):
    check_company(QUICKSTART, 1)
    part, name = path.split(".")
    of_part = dataclasses.replace(getattr(QUICKSTART, part), **{name: value})
    config = dataclasses.replace(QUICKSTART, **{part: of_part})
    with pytest.raises(ValueError, match=rf"--from=1: with algorithm.max_policy_lag above 0 and .*{message}"):
        check_company(config, 1)

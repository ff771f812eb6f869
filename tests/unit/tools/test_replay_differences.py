"""The first difference between a run and its replay is named by step and place."""

import math

import pytest

from tests.kit.runs import group, write_step
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import ScheduleFile, schedule_of
from torchtitan_rl.tools.replay_differences import compared, first_replay_difference


def write_run(path, change=lambda step, groups: None, weights=("00000001aaaaaaaa", "00000002bbbbbbbb")):
    """Two steps with a group each, and the weights after each."""
    run_dir = RunDir.create(path)
    attempts.begin(run_dir, None)
    file = ScheduleFile(str(schedule_of(path, 1)), "generator-0")
    for step in (1, 2):
        groups = [group(step, ["right", "wrong"], [1.0, 0.0])]
        change(step, groups)
        write_step(run_dir, step, groups)
        if step <= len(weights) and weights[step - 1] is not None:
            file.loaded(step, 0, step, weights[step - 1], ["embedding", "norm"])
            run_dir.record("versions", step, [{"version": step}])
    file.close()
    return run_dir


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def difference(run, replay):
    return str(first_replay_difference(run, 1, replay, first=0, last=2))


def test_equal_runs_do_not_differ(run, tmp_path):
    replay = write_run(tmp_path / "replay")
    assert first_replay_difference(run, 1, replay, first=0, last=2) is None
    assert compared(replay, first=0, last=2) == "2 batches, 4 rollouts, 12 tokens, 2 versions of the weights"


def test_a_token_is_named_with_its_rollout_and_turn(run, tmp_path):
    def change(step, groups):
        if step == 2:
            groups[0][0].rollouts[1].turns[0].completion.tokens[1] = 9

    replay = write_run(tmp_path / "replay", change)
    assert difference(run, replay) == "step 2, rollout 2/0/1, turn 0, token 1, tokens: was 4, is 9"


def test_a_reward_is_named(run, tmp_path):
    def change(step, groups):
        if step == 2:
            groups[0][0].rollouts[1].reward, groups[0][0].advantages[0] = 0.5, 0.25

    replay = write_run(tmp_path / "replay", change)
    assert (
        difference(run, replay) == "step 2, rollout 2/0/1, reward: was 0.0, is 0.5"
    )  # and not its sibling's advantage


def test_a_tensor_is_named_with_its_version(run, tmp_path):
    replay = write_run(tmp_path / "replay", weights=("00000001aaaaaaab", "00000002bbbbbbbb"))
    assert difference(run, replay) == "step 1, weights of version 1, norm: was 'aaaaaaaa', is 'aaaaaaab'"


def test_a_version_that_the_replay_never_published_is_a_difference(run, tmp_path):
    replay = write_run(tmp_path / "replay", weights=("00000001aaaaaaaa",))
    assert (
        first_replay_difference(run, 1, replay, first=0, last=2) is None
    )  # a version after the last step may be missing
    replay = write_run(tmp_path / "without", weights=(None, "00000002bbbbbbbb"))
    assert difference(run, replay) == "step 1, weights of version 1: was '00000001aaaaaaaa', is None"


def test_a_metric_is_compared_unless_time_decides_it(run, tmp_path):
    replay = write_run(tmp_path / "replay")
    text = replay.metrics_file.read_text()
    replay.metrics_file.write_text(text.replace('"time/step_s":1.0', '"time/step_s":2.0'))
    assert first_replay_difference(run, 1, replay, first=0, last=2) is None
    replay.metrics_file.write_text(text.replace('"policy/entropy":2.0', '"policy/entropy":2.5', 1))
    assert difference(run, replay) == "step 1, metrics, policy/entropy: was 2.0, is 2.5"


def test_a_value_that_is_no_number_both_times_is_no_difference(tmp_path):
    def change(step, groups):
        rollout = groups[0][0].rollouts[0]
        rollout.reward, rollout.reward_parts = math.nan, {"length": math.nan}
        groups[0][0].advantages[0] = math.nan
        rollout.turns[0].completion.logprobs[0] = math.nan

    runs = [write_run(tmp_path / name, change) for name in ("run", "replay")]
    for run in runs:
        line = {"step": 1, "phase": "evaluation", "eval/name": "sort", "eval/split": "test", "eval/accuracy": math.nan}
        run.log_metrics(line)
    assert first_replay_difference(runs[0], 1, runs[1], first=0, last=2) is None
    number = write_run(tmp_path / "number")
    assert difference(runs[0], number).startswith("step 1, rollout 1/0/0, turn 0, token 0, logprobs: was nan, is ")


def test_a_missing_batch_is_a_difference(run, tmp_path):
    replay = RunDir.create(tmp_path / "replay")
    attempts.begin(replay, None)
    assert difference(run, replay) == "step 1, number of rollouts: was 2, is 0"


def test_an_evaluation_before_the_first_batch_is_compared_where_it_was_made_again(run, tmp_path):
    line = {"step": 0, "phase": "evaluation", "eval/name": "sort", "eval/split": "validation", "eval/accuracy": 0.25}
    replay = write_run(tmp_path / "replay")
    run.log_metrics(line)
    assert first_replay_difference(run, 1, replay, first=0, last=2) is None
    replay.log_metrics(line | {"eval/accuracy": 0.5})
    assert difference(run, replay) == 'step 0, evaluation ["sort", "validation"], eval/accuracy: was 0.25, is 0.5'

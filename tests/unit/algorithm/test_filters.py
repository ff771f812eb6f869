"""What does not train, how a batch is filled, and when a run gives up."""

import dataclasses
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.family import Family
from tests.kit.rollouts import attempts, group, rollout, turn
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.filters import filtered, overlong_penalty
from torchtitan_rl.algorithm.grouping import form_groups
from torchtitan_rl.algorithm.reductions import sequence_mean
from torchtitan_rl.config.algorithm import AlgorithmConfig, FilterConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig, SamplingConfig
from torchtitan_rl.rollout.batches import BatchPlayer, SynchronousBatches
from torchtitan_rl.rollout.draws import Draws, NothingToTrainOn
from torchtitan_rl.tasks.family import TaskSource
from torchtitan_rl.types.run_state import RunState


def config(tasks_per_step=2, precomputed_advantages="auto", **filters):
    return AlgorithmConfig(
        tasks_per_step=tasks_per_step, filters=FilterConfig(**filters), precomputed_advantages=precomputed_advantages
    )


def sized(length, reward, *, i=0, truncated=False):
    return rollout(f"0/0/{i}", turn([1], [2] * length, truncated=truncated), reward=reward)


def ids(groups):
    return [[each.id for each in group.rollouts] for group in groups]


# Filters.


def test_without_filters_everything_passes_untouched():
    groups = [group(*attempts(0, [1.0, 1.0])), group(sized(8, 0.0, truncated=True))]
    kept, left_out = filtered(groups, config(), max_tokens=8)
    assert kept == groups and kept[0] is groups[0] and left_out == []
    assert groups[1].rewards == [0.0] and not groups[1].rollouts[0].masked


def test_groups_whose_rewards_are_all_equal_are_left_out():
    right, mixed, wrong = (group(*attempts(0, rewards)) for rewards in ([1.0, 1.0], [1.0, 0.0], [0.0, 0.0]))
    kept, left_out = filtered([right, mixed, wrong], config(zero_variance=True), max_tokens=8)
    assert kept == [mixed] and left_out == [replace(group, left_out="zero_variance") for group in (right, wrong)]


def test_a_group_that_weighs_itself_needs_no_variance():
    own = group(rollout("0/0/0", turn([1], [2], advantages=0.5)))
    assert filtered([own], config(zero_variance=True), max_tokens=8) == ([own], [])
    ignored = config(zero_variance=True, precomputed_advantages="ignore")
    assert filtered([own], ignored, max_tokens=8) == ([], [replace(own, left_out="zero_variance")])


def test_a_group_that_lacks_required_advantages_is_refused_and_not_left_out():
    required = config(zero_variance=True, precomputed_advantages="require")
    kept, left_out = filtered([group(*attempts(0, [1.0, 1.0]))], required, max_tokens=8)
    assert left_out == []
    with pytest.raises(ValueError, match="precomputed_advantages='require'.*NONE: of 2 turns 0 carry advantages"):
        to_datums(kept, required)


def test_dropped_rollouts_leave_their_group():
    rollouts = [sized(2, 1.0), sized(8, 5.0, i=1, truncated=True), sized(2, 0.0, i=2)]
    (kept,), (out,) = filtered([group(*rollouts)], config(overlong="drop"), max_tokens=8)
    assert ids([kept, out]) == [["0/0/0", "0/0/2"], ["0/0/1"]] and kept.id == out.id == "0/0"
    assert [d.loss_inputs["advantages"].tolist() for d in to_datums([kept], config())] == [[0.5, 0.5], [-0.5, -0.5]]
    assert filtered([group(rollouts[1])], config(overlong="drop"), max_tokens=8)[0] == []


def test_dropping_may_leave_equal_rewards():
    made = group(sized(2, 1.0), sized(8, 0.0, i=1, truncated=True))
    kept, left_out = filtered([made], config(overlong="drop", zero_variance=True), max_tokens=8)
    assert kept == [] and ids(left_out) == [["0/0/1"], ["0/0/0"]]
    assert [group.left_out for group in left_out] == ["overlong", "zero_variance"]


def test_masked_rollouts_count_among_their_siblings_and_do_not_train():
    made = group(sized(2, 1.0), sized(3, 0.0, i=1, truncated=True))
    (kept,), left_out = filtered([made], config(overlong="mask"), max_tokens=3)
    assert kept is made and left_out == []
    first, second = to_datums([kept], AlgorithmConfig(reduction=sequence_mean))
    assert first.loss_inputs["advantages"].tolist() == [0.5, 0.5]
    assert first.loss_inputs["token_weights"].tolist() == [0.25, 0.25]  # an empty sequence is still one of two
    for name in ("loss_mask", "token_weights", "advantages"):
        assert second.loss_inputs[name].tolist() == [0.0, 0.0, 0.0]


def test_a_group_of_masked_rollouts_only_is_left_out():
    made = group(sized(3, 1.0, truncated=True), sized(3, 0.0, i=1, truncated=True))
    assert filtered([made], config(overlong="mask"), max_tokens=3) == ([], [replace(made, left_out="overlong")])


def test_a_group_that_a_workflow_has_masked_was_not_cut_off():
    made = group(sized(2, 1.0), sized(2, 0.0, i=1))
    for masked in made.rollouts:
        masked.masked = True
    assert filtered([made], config(zero_variance=True), max_tokens=3) == ([made], [])


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (6, 0.0), (7, 0.5), (8, 1.0), (9, 1.5), (10, 2.0), (11, 2.0)]
)
def test_the_penalty_grows_over_the_buffer(length, penalty):
    assert overlong_penalty(length, max_tokens=10, buffer=4, penalty=2.0) == penalty


@pytest.mark.parametrize(("length", "penalty"), [(9, 0.0), (10, 2.0)])
def test_without_a_buffer_it_is_a_step(length, penalty):
    assert overlong_penalty(length, max_tokens=10, buffer=0, penalty=2.0) == penalty


@given(st.integers(0, 50), st.integers(0, 40), st.integers(0, 40))
def test_a_longer_completion_never_loses_less(length, limit, buffer):
    buffer = min(buffer, limit)
    assert 0 <= overlong_penalty(length, limit, buffer, 1.0) <= overlong_penalty(length + 1, limit, buffer, 1.0) <= 1


def test_the_penalty_is_taken_off_the_reward_by_the_longest_turn():
    made = group(sized(2, 1.0), rollout("0/0/1", turn([1], [2] * 7), turn([1], [2] * 3), reward=1.0))
    (kept,), _ = filtered([made], config(overlong="penalty", overlong_buffer=4, overlong_penalty=2.0), max_tokens=8)
    assert kept.rewards == [1.0, -0.5]


@pytest.mark.parametrize("cut", [{"truncated": True}, {"end_reason": "tokens"}])
def test_a_rollout_cut_by_what_room_was_left_is_overlong_however_short_its_turns_are(cut):
    """Two tokens of a limit of eight: the second turn had room for no more, or a third had room for none."""
    fields = {"end_reason": "tokens"} if "end_reason" in cut else {"end_reason": "done"}

    def made():
        return group(
            sized(2, 1.0),
            rollout(
                "0/0/1",
                turn([1], [2] * 3),
                turn([1], [2] * 2, truncated=cut.get("truncated", False)),
                reward=1.0,
                **fields,
            ),
        )

    (kept,), (out,) = filtered([made()], config(overlong="drop"), max_tokens=8)
    assert ids([kept, out]) == [["0/0/0"], ["0/0/1"]]
    (kept,), _ = filtered([made()], config(overlong="mask"), max_tokens=8)
    assert [each.masked for each in kept.rollouts] == [False, True]
    penalty = config(overlong="penalty", overlong_buffer=4, overlong_penalty=2.0)
    counts = Counter()
    (kept,), _ = filtered([made()], penalty, max_tokens=8, counts=counts)
    assert kept.rewards == [1.0, -1.0]
    assert counts == {"filter/overlong_rollouts": 1, "filter/overlong_penalty_sum": 2.0}


@pytest.mark.parametrize("end_reason", ["", "done", "turns", "time"])
def test_other_ends_of_a_rollout_are_not_overlong(end_reason):
    made = group(rollout("0/0/0", turn([1], [2] * 2), reward=1.0, end_reason=end_reason))
    assert filtered([made], config(overlong="drop"), max_tokens=8) == ([made], [])


# Batches.


class Tasks:
    """Rolls out tasks whose rewards are listed, one entry per task, and remembers what it was asked for."""

    def __init__(self, *rewards):
        self.rewards, self.asked, self.played = rewards, [], 0

    async def play(self, draws, counts):
        self.asked.append((len(draws), self.played))
        rollouts = []
        for i, draw in enumerate(draws, start=self.played):
            for attempt in attempts(i, self.rewards[i % len(self.rewards)]):
                rollouts.append(dataclasses.replace(attempt, group=draw.id))
        self.played += len(draws)
        return form_groups(rollouts, AlgorithmConfig(), counts)


async def filled(play, algorithm):
    config = RunConfig(
        name="unit",
        task=None,
        model=ModelConfig(assets="chars"),
        algorithm=algorithm,
        sampling=SamplingConfig(max_tokens=8),
    )
    draws, rollouts = Draws(TaskSource(Family(), "train", 0)), SimpleNamespace(play=play)
    player = BatchPlayer(algorithm, rollouts, draws, lambda draws, step: None, max_tokens=config.sampling.max_tokens)
    batches = SynchronousBatches(player, draws, RunState(seed=0))
    return await batches.next_batch()


MIXED, EQUAL = [1.0, 0.0], [1.0, 1.0]


async def test_without_filters_there_is_one_round_and_no_metric():
    tasks = Tasks(MIXED, EQUAL)
    batch = await filled(tasks.play, config())
    assert tasks.asked == [(2, 0)] and [group.id for group in batch.groups] == ["0/0", "1/0"]
    assert batch.metrics == {} and batch.left_out == [] and batch.sampled == batch.groups


async def test_a_batch_is_filled_with_as_many_tasks_as_are_missing():
    tasks = Tasks(MIXED, EQUAL, EQUAL, EQUAL, MIXED, MIXED)
    batch = await filled(tasks.play, config(tasks_per_step=3, zero_variance=True, max_resamples=5))
    assert tasks.asked == [(3, 0), (2, 3), (1, 5)] and [group.id for group in batch.groups] == ["0/0", "2/1", "1/2"]
    assert batch.metrics == {"filter/zero_variance_groups": 3, "filter/resampled_tasks": 3, "filter/missing_tasks": 0}


async def test_the_limit_leaves_a_smaller_batch():
    tasks = Tasks(MIXED, EQUAL)
    batch = await filled(tasks.play, config(tasks_per_step=4, zero_variance=True, max_resamples=1))
    assert tasks.asked == [(4, 0), (2, 4)] and [group.id for group in batch.groups] == ["0/0", "2/0", "1/1"]
    assert [group.id for group in batch.left_out] == ["1/0", "3/0", "3/1"]
    assert [group.id for group in batch.sampled] == ["0/0", "1/0", "2/0", "3/0", "1/1", "3/1"]
    assert batch.metrics == {"filter/zero_variance_groups": 3, "filter/resampled_tasks": 2, "filter/missing_tasks": 1}


async def test_without_resampling_what_passes_is_the_batch():
    tasks = Tasks(EQUAL, MIXED)
    batch = await filled(tasks.play, config(zero_variance=True))
    assert tasks.asked == [(2, 0)] and [group.id for group in batch.groups] == ["1/0"]
    assert batch.metrics["filter/missing_tasks"] == 1


async def test_an_empty_batch_is_tried_again_until_something_passes():
    tasks = Tasks(EQUAL, EQUAL, EQUAL, EQUAL, EQUAL, MIXED)
    batch = await filled(tasks.play, config(zero_variance=True))
    assert tasks.asked == [(2, 0), (2, 2), (2, 4)] and [group.id for group in batch.groups] == ["1/2"]
    assert batch.metrics["filter/resampled_tasks"] == 4


async def test_a_run_with_nothing_to_train_on_is_stalled_and_says_why():
    tasks = Tasks(EQUAL, [0.5, 0.5])
    with pytest.raises(NothingToTrainOn) as stall:
        await filled(tasks.play, config(zero_variance=True, max_stalled_rounds=3))
    assert len(tasks.asked) == 3 and len(stall.value.batch.left_out) == 6
    assert str(stall.value) == (
        "algorithm.filters.max_stalled_rounds=3: 3 rounds with 6 groups left nothing to train on "
        "(filter/missing_tasks=2, filter/resampled_tasks=4, filter/zero_variance_groups=6; rewards from 0.5 to 1); "
        "if rewards are as high as they can be the task is learned, else make it easier, check the reward, raise "
        "group_size or sampling.max_tokens, or switch the filter off"
    )


async def test_resampling_longer_than_the_guard_is_not_cut_short():
    tasks = Tasks(EQUAL)
    with pytest.raises(NothingToTrainOn):
        await filled(tasks.play, config(zero_variance=True, max_stalled_rounds=2, max_resamples=4))
    assert len(tasks.asked) == 5


async def test_a_workflow_that_never_plays_a_turn_stalls_the_run():
    async def roll_out(draws, counts):
        return form_groups([rollout(f"{draw.id}/0") for draw in draws], AlgorithmConfig(), counts)

    with pytest.raises(NothingToTrainOn) as stall:
        await filled(roll_out, config(max_stalled_rounds=2))
    assert str(stall.value) == (
        "algorithm.filters.max_stalled_rounds=2: 2 rounds left nothing to train on "
        "(filter/skipped_rollouts=4); see that the workflow plays turns"
    )


async def test_what_overlong_filters_did_is_counted():
    async def roll_out(draws, counts):
        attempts = sized(2, 1.0), sized(8, 0.0, i=1, truncated=True)
        return [group(*(replace(attempt, group=draws[0].id) for attempt in attempts))]

    async def metrics(**filters):
        return (await filled(roll_out, config(tasks_per_step=1, **filters))).metrics

    rest = {"filter/resampled_tasks": 0, "filter/missing_tasks": 0}
    assert await metrics(overlong="drop") == {"filter/overlong_rollouts": 1, **rest}
    assert await metrics(overlong="mask") == {"filter/overlong_rollouts": 1, **rest}
    assert await metrics(overlong="penalty", overlong_penalty=0.5) == {
        "filter/overlong_rollouts": 1,
        "filter/overlong_penalty_mean": 0.25,
    }

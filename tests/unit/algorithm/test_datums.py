"""Rollouts and demonstrations turned into datums, token by token."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kit.refusal import refusal
from torchtitan_rl.algorithm.advantages import group_centered
from torchtitan_rl.algorithm.datums import demonstration_datums, to_datums
from torchtitan_rl.algorithm.gae import with_gae
from torchtitan_rl.algorithm.inputs import minibatches, with_inputs
from torchtitan_rl.algorithm.reductions import prompt_mean, sequence_mean
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Completion, Rollout, RolloutGroup, Task, Turn

TASK = Task(id="t/0", prompt="")


def turn(prompt_tokens, tokens, logprobs):
    completion = Completion(tokens=tokens, logprobs=logprobs, policy_versions=[0] * len(tokens), finish_reason="stop")
    return Turn(prompt_tokens=prompt_tokens, completion=completion)


def rollout(reward, *turns):
    return Rollout(id="0/0/0", task=TASK, turns=list(turns), reward=reward)


def group(*rollouts):
    return RolloutGroup(id="0/0", rollouts=list(rollouts))


def lists(datum):
    """A datum as plain lists, so that one comparison covers it."""
    return {
        "tokens": datum.tokens.tolist(),
        "targets": datum.target_tokens.tolist(),
        **{name: tensor.tolist() for name, tensor in datum.loss_inputs.items()},
    }


PAIR = group(rollout(1.0, turn([5, 6, 7], [8, 9], [-0.5, -0.25])), rollout(0.0, turn([5, 6, 7], [4], [-2.0])))


def test_tokens_targets_masks_and_log_probabilities_line_up():
    # The last prompt token predicts the first completion token; the last completion token predicts nothing.
    first, second = to_datums([PAIR], AlgorithmConfig())
    third = torch.tensor(1 / 3).item()  # token mean over three trained tokens, as float32
    assert lists(first) == {
        "tokens": [5, 6, 7, 8],
        "targets": [6, 7, 8, 9],
        "loss_mask": [0, 0, 1, 1],
        "advantages": [0, 0, 0.5, 0.5],
        "sampling_logprobs": [0, 0, -0.5, -0.25],
        "token_weights": [0, 0, third, third],
    }
    assert lists(second) == {
        "tokens": [5, 6, 7],
        "targets": [6, 7, 4],
        "loss_mask": [0, 0, 1],
        "advantages": [0, 0, -0.5],
        "sampling_logprobs": [0, 0, -2.0],
        "token_weights": [0, 0, third],
    }
    assert PAIR.advantages == [0.5, -0.5]
    assert {tensor.dtype for tensor in first.loss_inputs.values()} == {torch.float32}
    assert first.tokens.dtype == first.target_tokens.dtype == torch.int64


def test_a_prompt_of_one_token():
    (datum,) = to_datums([group(rollout(1.0, turn([5], [8, 9], [-0.5, -0.25])))], AlgorithmConfig())
    assert lists(datum) == {
        "tokens": [5, 8],
        "targets": [8, 9],
        "loss_mask": [1, 1],
        "advantages": [0, 0],
        "sampling_logprobs": [-0.5, -0.25],
        "token_weights": [0.5, 0.5],
    }


def test_turns_that_extend_each_other_are_one_datum_with_observations_masked():
    turns = [turn([5], [8], [-1.0]), turn([5, 8, 6, 6], [9, 4], [-2.0, -3.0]), turn([5, 8, 6, 6, 9, 4], [2], [-4.0])]
    (first, second) = to_datums([group(rollout(3.0, *turns), rollout(1.0, turn([5], [7], [-3.0])))], AlgorithmConfig())
    w = torch.tensor(1 / 5).item()
    assert lists(first) == {
        "tokens": [5, 8, 6, 6, 9, 4],
        "targets": [8, 6, 6, 9, 4, 2],
        "loss_mask": [1, 0, 0, 1, 1, 1],
        "advantages": [1, 0, 0, 1, 1, 1],
        "sampling_logprobs": [-1, 0, 0, -2, -3, -4],
        "token_weights": [w, 0, 0, w, w, w],
    }
    assert lists(second)["advantages"] == [-1.0]
    assert [(datum.group, datum.rollout) for datum in (first, second)] == [(0, 0), (0, 1)]


@pytest.mark.parametrize(
    "prompt", [[5, 6], [5], [4, 8, 9], [5, 8, 7]], ids=["other answer", "shorter", "other start", "cut"]
)
def test_a_turn_that_does_not_extend_the_one_before_is_another_datum_of_its_rollout(prompt):
    two_turns = rollout(3.0, turn([5], [8, 9], [-1.0, -1.0]), turn(prompt, [9], [-2.0]))
    data = to_datums([group(two_turns, rollout(1.0, turn([5], [7], [-3.0])))], AlgorithmConfig())
    assert [datum.tokens.tolist() for datum in data] == [[5, 8], prompt, [5]]
    assert [datum.loss_inputs["advantages"].tolist()[-1] for datum in data] == [1.0, 1.0, -1.0]
    assert [(datum.group, datum.rollout) for datum in data] == [(0, 0), (0, 0), (0, 1)]


def test_after_a_turn_that_starts_anew_turns_are_merged_again():
    turns = [turn([5], [8], [-1.0]), turn([3], [4], [-1.0]), turn([3, 4], [6], [-1.0])]
    data = to_datums([group(rollout(3.0, *turns))], AlgorithmConfig())
    assert [datum.tokens.tolist() for datum in data] == [[5], [3, 4]]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=3), st.booleans()
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_sampled_token_trains_once_after_the_tokens_it_was_sampled_after(drawn):
    turns, so_far = [], []
    for observation, sampled, starts_anew in drawn:
        prompt = [9, *observation] if starts_anew or not so_far else so_far + observation
        turns.append(turn(prompt, sampled, [-1.0] * len(sampled)))
        so_far = prompt + sampled
    seen = []
    for datum in to_datums([group(rollout(1.0, *turns))], AlgorithmConfig()):
        for t in datum.loss_inputs["loss_mask"].nonzero()[:, 0].tolist():
            seen.append((datum.tokens[: t + 1].tolist(), int(datum.target_tokens[t])))
    assert seen == [
        (each.prompt_tokens + each.completion.tokens[:i], token)
        for each in turns
        for i, token in enumerate(each.completion.tokens)
    ]


def test_advantages_are_a_groups_own_and_reductions_see_which_group_a_datum_is_of():
    groups = [
        group(rollout(4.0, turn([5], [8], [-1.0])), rollout(2.0, turn([5], [8], [-1.0]))),
        group(rollout(9.0, turn([5], [8], [-1.0]))),
    ]
    data = to_datums(groups, AlgorithmConfig(reduction=prompt_mean))
    assert [datum.loss_inputs["advantages"].tolist() for datum in data] == [[1.0], [-1.0], [0.0]]
    assert [datum.loss_inputs["token_weights"].tolist() for datum in data] == [[0.25], [0.25], [0.5]]


@pytest.mark.parametrize("bad", [math.inf, -math.inf])
def test_a_token_whose_log_probability_is_not_finite_does_not_train(bad):
    groups = [group(rollout(2.0, turn([5], [8, 9], [-0.5, bad])), rollout(0.0, turn([5], [7], [-1.0])))]
    data = to_datums(groups, AlgorithmConfig())
    assert lists(data[0]) == {
        "tokens": [5, 8],
        "targets": [8, 9],
        "loss_mask": [1, 0],
        "advantages": [1, 0],
        "sampling_logprobs": [-0.5, 0],
        "token_weights": [0.5, 0],
    }
    assert data[1].loss_inputs["token_weights"].tolist() == [0.5]


def test_a_nan_log_probability_is_an_error_that_names_its_token():
    groups = [group(rollout(2.0, turn([5], [8, 9], [-0.5, math.nan])), rollout(0.0, turn([5], [7], [-1.0])))]
    with pytest.raises(RuntimeError, match="token 1 was sampled with log-probability NaN"):
        to_datums(groups, AlgorithmConfig())


def test_completions_of_another_distribution_are_refused():
    bad = rollout(2.0, turn([5], [8, 9], [-0.5, -0.5]))
    bad.turns[0].completion.filtered = "top_p=0.9"
    with pytest.raises(
        ValueError, match="was sampled with top_p=0.9; its log-probabilities are not those of the policy"
    ):
        to_datums([group(bad, rollout(0.0, turn([5], [7], [-1.0])))], AlgorithmConfig())


def test_an_estimator_sees_the_rewards_in_double_precision():
    seen = []

    def estimator(rewards_G):
        seen.append(rewards_G)
        return torch.zeros_like(rewards_G)

    to_datums([PAIR], AlgorithmConfig(advantage_fn=estimator))
    assert seen[0].tolist() == [1.0, 0.0] and seen[0].dtype == torch.float64


def one_too_many(rewards_G):
    return torch.cat([rewards_G, rewards_G[:1]])


def divided_by_zero(rewards_G):
    return rewards_G / 0.0


def refused(advantage_fn):
    return refusal(to_datums, [PAIR], AlgorithmConfig(advantage_fn=advantage_fn))


def test_an_estimator_with_the_wrong_number_of_advantages_is_refused():
    assert refused(one_too_many) == (
        "algorithm.advantage_fn=one_too_many: gave [1.0, 0.0, 1.0] for rewards [1.0, 0.0] of group 0/0; "
        "return one finite number per rollout, as a tensor or a list"
    )


def test_an_estimator_with_advantages_that_are_not_finite_is_refused():
    assert refused(divided_by_zero) == (
        "algorithm.advantage_fn=divided_by_zero: gave [inf, nan] for rewards [1.0, 0.0] of group 0/0; "
        "return one finite number per rollout, as a tensor or a list"
    )


@pytest.mark.parametrize("returned", [torch.tensor(0.5), torch.zeros(2, 1), None], ids=["number", "matrix", "None"])
def test_an_estimator_that_gives_no_vector_is_refused(returned):
    def estimator(rewards_G):
        return returned

    assert "algorithm.advantage_fn=" in refused(estimator)


def test_a_partial_estimator_is_refused_by_the_name_of_its_function():
    def scaled(rewards_G, scale):
        return scale * rewards_G

    assert "scaled" in refused(functools.partial(scaled, scale=math.nan))
    data = to_datums([PAIR], AlgorithmConfig(advantage_fn=functools.partial(scaled, scale=2.0)))
    assert data[0].loss_inputs["advantages"].tolist() == [0, 0, 2.0, 2.0]


def test_of_a_demonstration_only_the_completion_is_learned():
    first, second = demonstration_datums([([5, 6, 7], [8, 9]), ([5], [4, 3])], AlgorithmConfig())
    assert lists(first) == {
        "tokens": [5, 6, 7, 8],
        "targets": [6, 7, 8, 9],
        "loss_mask": [0, 0, 1, 1],
        "token_weights": [0, 0, 0.25, 0.25],
    }
    assert lists(second) == {"tokens": [5, 4], "targets": [4, 3], "loss_mask": [1, 1], "token_weights": [0.25, 0.25]}


def test_every_demonstration_is_a_group_of_its_own():
    pairs = [([5], [8, 9]), ([5], [4])]
    for reduction in (sequence_mean, prompt_mean):
        first, second = demonstration_datums(pairs, AlgorithmConfig(reduction=reduction))
        assert first.loss_inputs["token_weights"].tolist() == [0.25, 0.25]
        assert second.loss_inputs["token_weights"].tolist() == [0.5]


def test_the_default_estimator_is_the_centred_one():
    assert AlgorithmConfig().advantage_fn is group_centered


def four_groups():
    """Groups of 2, 1, 2 and 1 rollouts with 1, 2, ... tokens."""
    lengths = iter(range(1, 7))
    groups = [
        group(*(rollout(float(i % 2), turn([3], [5] * n, [-1.0] * n)) for i, n in zip(range(size), lengths)))
        for size in (2, 1, 2, 1)
    ]
    return to_datums(groups, AlgorithmConfig(advantage_fn=group_centered))


def test_minibatches_hold_whole_groups_and_the_last_one_what_is_left():
    parts = minibatches(four_groups(), AlgorithmConfig(tasks_per_minibatch=3, reduction=sequence_mean))
    assert [[datum.group for datum in part] for part in parts] == [[0, 0, 1, 2, 2], [3]]
    assert [sum(float(d.loss_inputs["token_weights"].sum()) for d in part) for part in parts] == pytest.approx(
        [1.0, 1.0]
    )


def test_a_minibatch_counts_tasks_and_holds_the_groups_of_every_role():
    groups = []
    for slot in range(5):
        for role in ("solver", "judge")[: 1 if slot == 3 else 2]:  # a filter left the judge of slot 3 out
            rollouts = [rollout(float(i), turn([3], [5], [-1.0])) for i in range(2)]
            for each in rollouts:
                each.group, each.role = f"{slot}/0", role
            groups.append(RolloutGroup(id=f"{slot}/0/{role}", rollouts=rollouts))
    config = AlgorithmConfig(tasks_per_step=5, tasks_per_minibatch=2, num_epochs=1, reduction=sequence_mean)
    data = to_datums(groups, config)
    parts = minibatches(data, config, groups)
    assert [sorted({datum.group for datum in part}) for part in parts] == [[0, 1, 2, 3], [4, 5, 6], [7, 8]]
    assert len(parts) == config.steps_per_batch == 3
    rest = [datum for datum in data if datum.group > 1]  # nothing of the first task is left to train on
    parts = minibatches(rest, config, groups)
    assert [sorted({datum.group for datum in part}) for part in parts] == [[2, 3, 4, 5], [6, 7, 8]]


def test_the_ragged_minibatch_is_the_mean_of_its_own_tokens():
    (*_, last) = minibatches(four_groups(), AlgorithmConfig(tasks_per_minibatch=3, reduction=prompt_mean))
    assert last[0].loss_inputs["token_weights"].tolist() == pytest.approx([1 / 6] * 6)


def test_more_inputs_leave_the_datum_they_were_added_to_alone():
    data = four_groups()
    more = with_inputs(data, old_logprobs=[torch.full((len(d),), -2.0) for d in data])
    assert "old_logprobs" not in data[0].loss_inputs and more[2].loss_inputs["old_logprobs"].tolist() == [-2.0] * 3
    assert [d.group for d in more] == [d.group for d in data]


@pytest.mark.parametrize("logprobs", [[], [-1.0], [-1.0] * 3])
@pytest.mark.parametrize("advantages", [None, 0.5])
def test_a_log_probability_is_missing_or_one_too_many(logprobs, advantages):
    made = group(rollout(1.0, turn([5], [8, 9], logprobs)))
    made.rollouts[0].turns[0].advantages = advantages
    message = f"completion.logprobs: {len(logprobs)} for 2 sampled tokens in a turn of rollout 0/0/0; give one"
    with pytest.raises(ValueError, match=message):
        to_datums([made], AlgorithmConfig())


def test_a_critics_values_become_advantages_and_returns():
    data = to_datums([PAIR], AlgorithmConfig())
    values = [torch.tensor([9.0, 9.0, 0.25, 0.5]), torch.tensor([9.0, 9.0, 0.5])]
    first, second = with_gae(data, [1.0, 0.0], values, AlgorithmConfig())
    assert first.loss_inputs["advantages"].tolist() == [0.0, 0.0, 0.75, 0.5]
    assert first.loss_inputs["returns"].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert second.loss_inputs["advantages"].tolist() == [0.0, 0.0, -0.5]
    assert second.loss_inputs["values"] is values[1]


def test_a_turn_of_one_token_is_refused_by_its_rollout():
    alone, after = rollout(1.0, turn([5], [], [])), rollout(0.0, turn([5, 6], [7], [-1.0]), turn([9], [], []))
    assert refusal(to_datums, [group(alone)], AlgorithmConfig()).startswith(
        "rollout=0/0/0: turn 0 is one token, prompt"
    )
    assert refusal(to_datums, [group(after)], AlgorithmConfig()).startswith(
        "rollout=0/0/0: turn 1 is one token, prompt"
    )
    goes_on = rollout(1.0, turn([5], [], []), turn([5, 6], [7], [-1.0]))
    assert [datum.tokens.tolist() for datum in to_datums([group(goes_on)], AlgorithmConfig())] == [[5, 6]]

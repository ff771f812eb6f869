"""Estimators that see lengths and reward parts, by hand, against their formulas and against other projects' code."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.rollouts import group, rollout, turn
from tests.unit.algorithm import reference
from torchtitan_rl.algorithm.advantages import (
    batch_estimator,
    estimate_advantages,
    group_centered,
    group_estimator,
    grpo,
    reinforce,
    reinforce_pp_baseline,
)
from torchtitan_rl.algorithm.group_estimators import gdpo, length_discounted, length_rewarded, opo, remax
from torchtitan_rl.algorithm.judged_group import JudgedGroup
from torchtitan_rl.config.algorithm import AlgorithmConfig


def played(rewards, lengths, parts=None, *, id="0/0"):
    """A group of rollouts of one turn; `parts` is a list with the reward parts of each rollout."""
    return group(
        *(
            rollout(
                f"{id}/{i}",
                turn([1], [2] * length),
                reward=reward,
                reward_parts=dict(parts[i]) if parts is not None else {},
            )
            for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
        ),
        id=id,
    )


def of_groups(estimator, *groups):
    """Advantages of groups, through the function that training uses."""
    estimate_advantages(list(groups), AlgorithmConfig(advantage_fn=estimator))
    return [group.advantages for group in groups]


def test_a_group_estimator_sees_lengths_over_all_turns_and_parts():
    seen = []

    @group_estimator
    def looks(judged, *, factor):
        seen.append(judged)
        return factor * judged.rewards_G

    two = rollout("a", turn([1], [2, 3, 4]), turn([9], [5, 6]), reward=2.0, reward_parts={"exact": 1.0, "form": 0.5})
    other = rollout("b", turn([1], [7]), reward=-1.0, reward_parts={"exact": 0.0})
    assert of_groups(functools.partial(looks, factor=2.0), group(two, other)) == [[4.0, -2.0]]
    (judged,) = seen
    assert judged.rewards_G.tolist() == [2.0, -1.0] and judged.lengths_G.tolist() == [5.0, 1.0]
    assert judged.rewards_G.dtype == judged.lengths_G.dtype == torch.float64
    assert judged.rollouts == (two, other) and judged.id == "0/0"
    assert judged.part_names == ["exact"] and judged.part("exact").tolist() == [1.0, 0.0]
    with pytest.raises(ValueError) as caught:
        judged.part("form")
    assert str(caught.value) == (
        "reward part 'form': rollout b has 'exact'; let the reward return (rewards, parts) with this part for every "
        "completion"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        judged.id = "other"


def test_both_marks_see_the_groups_of_a_batch():
    @batch_estimator
    @group_estimator
    def against_the_longest(groups):
        longest = max(float(judged.lengths_G.max()) for judged in groups)
        return [judged.lengths_G / longest for judged in groups]

    assert of_groups(against_the_longest, played([0.0, 0.0], [1, 2]), played([0.0], [4])) == [[0.25, 0.5], [1.0]]


def test_opo_weighs_the_baseline_by_length():
    # (1 x 3 + 0 x 1) / 4 = 0.75.
    assert of_groups(opo, played([1.0, 0.0], [3, 1])) == [[0.25, -0.75]]
    assert of_groups(opo, played([1.0, 0.0], [2, 2])) == [[0.5, -0.5]]  # equal lengths: the plain mean


def test_opo_of_one_of_equal_rewards_and_of_empty_completions():
    assert of_groups(opo, played([0.7], [3]), played([0.5] * 3, [1, 2, 5])) == [[0.0], [0.0] * 3]
    assert of_groups(opo, played([1.0, 0.0], [0, 0]), played([1.0, 0.0], [0, 4])) == [[0.5, -0.5], [1.0, 0.0]]


def test_remax_subtracts_the_greedy_rollouts_reward():
    judged = played([1.0, 0.25, 0.5], [3, 1, 2])
    for rollout_, baseline in zip(judged.rollouts, [0.5, 0.5, 0.5]):
        rollout_.baseline = baseline
    assert of_groups(remax, judged) == [[0.5, -0.25, 0.0]]
    alone = played([1.0], [3])
    alone.rollouts[0].baseline = -1.0
    assert of_groups(remax, alone) == [[2.0]]  # a group of one learns, and equal rewards do
    judged.rollouts[1].baseline = None
    with pytest.raises(
        ValueError, match="^algorithm.greedy_baseline: rollout 0/0/1 has no greedy one beside it; set it"
    ):
        of_groups(remax, judged)


def test_remax_is_verls():
    """verl/trainer/ppo/core_algos.py, compute_remax_outcome_advantage: the return of each token less the baseline."""
    rng = np.random.default_rng(0)
    rewards, baselines = rng.normal(size=6), rng.normal(size=6)
    judged = played(rewards.tolist(), [1] * 6)
    for rollout_, baseline in zip(judged.rollouts, baselines.tolist()):
        rollout_.baseline = baseline
    token_rewards = np.zeros((6, 4))
    token_rewards[:, -1] = rewards
    theirs = token_rewards[:, ::-1].cumsum(-1)[:, ::-1] - baselines[:, None]
    for ours, row in zip(of_groups(remax, judged)[0], theirs, strict=True):
        assert [ours] * 4 == pytest.approx(row.tolist(), rel=1e-14)


judged_rewards = st.lists(
    st.tuples(st.floats(-10, 10).map(lambda x: round(x, 3)), st.integers(1, 40)), min_size=1, max_size=8
)


@settings(deadline=None, derandomize=True)
@given(pairs=judged_rewards)
def test_opo_is_its_formula(pairs):
    rewards, lengths = zip(*pairs)
    (ours,) = of_groups(opo, played(rewards, lengths))
    assert ours == pytest.approx(reference.opo(rewards, lengths), rel=1e-10, abs=1e-10)


def opo_of_verl(rewards, lengths):
    """verl/trainer/ppo/core_algos.py, compute_opo_outcome_advantage, before it is spread over tokens: a group of one
    has the baseline 0."""
    if len(rewards) == 1:
        return rewards
    return rewards - (lengths * rewards).sum() / lengths.sum()


def test_opo_is_verls_but_for_a_group_of_one():
    rng = np.random.default_rng(0)
    for size in (2, 3, 8, 16):
        rewards, lengths = rng.normal(size=size), rng.integers(1, 50, size)
        (ours,) = of_groups(opo, played(rewards.tolist(), lengths.tolist()))
        assert ours == pytest.approx(opo_of_verl(rewards, lengths).tolist(), rel=1e-12, abs=1e-14)
    assert opo_of_verl(np.array([0.7]), np.array([3])).tolist() == [0.7]


SHORT = functools.partial(length_rewarded, weight=0.5, correct=0.0)
BRIEF = functools.partial(length_discounted, alpha=0.4, correct=0.0)


def test_a_reward_for_being_short_by_hand():
    judged = played([1.0, 1.0, 0.0, 0.0], [10, 20, 10, 30])
    # Lengths as shares of the way from 10 to 30: 0, 1/2, 0, 1. Right: 1/2 and 0. Wrong: never above 0, so 0 and -1/2.
    shaped = functools.partial(length_rewarded, weight=0.5, estimator=reinforce)
    assert of_groups(shaped, judged) == [[1.25, 1.0, 0.0, -0.25]]
    centred = functools.partial(length_rewarded, weight=0.5, estimator=group_centered)
    assert of_groups(centred, judged) == [[0.75, 0.5, -0.5, -0.75]]
    assert judged.rewards == [1.0, 1.0, 0.0, 0.0]  # what is recorded stays the reward


def test_a_discount_by_length_by_hand():
    # Right ones have 10 and 30 tokens: mean 20, deviation 10, so a sigmoid of -1 and of 1. Wrong ones lose nothing.
    judged = played([1.0, 1.0, 0.0, 0.5], [10, 30, 500, 2])
    shaped = functools.partial(length_discounted, alpha=0.5, estimator=reinforce)
    high = 1 / (1 + np.exp(-1.0))
    assert of_groups(shaped, judged)[0] == pytest.approx([1 - 0.5 * (1 - high), 1 - 0.5 * high, 0.0, 0.5], rel=1e-14)


def test_equal_lengths_and_no_right_rollout():
    equal = played([1.0, 0.0, 1.0], [7, 7, 7])
    assert of_groups(functools.partial(length_rewarded, weight=0.5), equal) == [grpo(as_tensor([1.0, 0, 1])).tolist()]
    half = functools.partial(length_discounted, alpha=0.5, estimator=reinforce)
    assert of_groups(half, equal) == [[0.75, 0.0, 0.75]]
    wrong = played([0.0, 0.5], [3, 9])
    assert of_groups(half, wrong) == [[0.0, 0.5]]
    for estimator in (functools.partial(length_rewarded, weight=0.5), functools.partial(length_discounted, alpha=0.5)):
        assert of_groups(estimator, played([1.0], [4]), played([0.0], [4])) == [[0.0], [0.0]]


def as_tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@settings(deadline=None, derandomize=True)
@given(pairs=judged_rewards, correct=st.sampled_from([-1.0, 0.0, 1.0]))
def test_shaped_rewards_are_their_formulas(pairs, correct):
    rewards, lengths = zip(*pairs)
    judged = played(rewards, lengths)
    short = functools.partial(length_rewarded, weight=0.3, correct=correct, estimator=reinforce)
    expected = reference.length_rewarded(rewards, lengths, 0.3, correct)
    assert of_groups(short, judged)[0] == pytest.approx(expected, rel=1e-10, abs=1e-10)
    brief = functools.partial(length_discounted, alpha=0.3, correct=correct, estimator=reinforce)
    expected = reference.length_discounted(rewards, lengths, 0.3, correct)
    assert of_groups(brief, judged)[0] == pytest.approx(expected, rel=1e-10, abs=1e-10)


def len_reward_of_open_r1(lengths, is_right):
    """open-r1, src/open_r1/rewards.py, len_reward, which counts characters."""
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [share if right else min(0, share) for share, right in zip(shares, is_right)]


def reward_of_efficient_reasoning(lengths, is_right, alpha):
    """Zanette-Labs/efficient-reasoning, math_server.py, reward_type="sigmoid": 1e-7 beside the deviation."""
    of_right = [length for length, right in zip(lengths, is_right) if right]
    relative = [(length - np.mean(of_right)) / (np.std(of_right) + 1e-7) for length in lengths]
    return [right * (1 - alpha / (1 + np.exp(-x))) for x, right in zip(relative, is_right)]


def test_shaped_rewards_are_those_of_the_projects():
    rng = np.random.default_rng(1)
    for size in (2, 5, 16):
        lengths, is_right = rng.integers(1, 200, size).tolist(), rng.integers(0, 2, size).astype(float).tolist()
        is_right[0] = 1.0
        judged = played(is_right, lengths)
        ours = of_groups(functools.partial(length_rewarded, weight=1.0, estimator=reinforce), judged)[0]
        theirs = len_reward_of_open_r1(lengths, is_right)
        assert ours == pytest.approx([r + x for r, x in zip(is_right, theirs)], rel=1e-12)
        ours = of_groups(functools.partial(length_discounted, alpha=0.4, estimator=reinforce), judged)[0]
        assert ours == pytest.approx(reward_of_efficient_reasoning(lengths, is_right, 0.4), rel=1e-7)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (functools.partial(length_rewarded, weight=0.0), "weight=0.0: is no weight of a length reward; use a number"),
        (functools.partial(length_rewarded, weight=float("nan")), "weight=nan: is no weight"),
        (functools.partial(length_discounted, alpha=1.0), "alpha=1.0: is no share of a reward; use a number between"),
        (functools.partial(length_discounted, alpha=0.0), "alpha=0.0: is no share of a reward"),
        (functools.partial(length_rewarded, weight=1.0, estimator=opo), "is not an estimator of one group's rewards"),
        (
            functools.partial(length_discounted, alpha=0.1, estimator=reinforce_pp_baseline),
            "is not an estimator of one group's rewards; give one such as grpo or rloo",
        ),
        (functools.partial(length_discounted, alpha=0.1, estimator="rloo"), "estimator='rloo': is not an estimator"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(estimator, message):
    with pytest.raises(ValueError) as caught:
        of_groups(estimator, played([1.0, 0.0], [3, 4]))
    assert message in str(caught.value)


def with_parts(parts, *, id="0/0"):
    """A group whose rollouts have the parts, a dict of lists; its rewards are not read."""
    rows = [dict(zip(parts, numbers)) for numbers in zip(*parts.values())]
    return played([0.0] * len(rows), [2] * len(rows), rows, id=id)


def test_gdpo_tells_apart_what_the_sum_of_rewards_does_not():
    # The paper's example: rewards (0, 1) and (0, 2) are one to GRPO after its division, and differ here.
    first = with_parts({"a": [0.0, 1.0], "b": [0.0, 0.0]})
    second = with_parts({"a": [0.0, 1.0], "b": [0.0, 1.0]}, id="0/1")
    # GRPO of a part: -1, 1; of an equal part: 0. Sums -1, 1 and -2, 2; their mean square is 2.5.
    root = np.sqrt(2.5)
    ours = of_groups(gdpo, first, second)
    assert ours[0] == pytest.approx([-1 / root, 1 / root], rel=1e-14)
    assert ours[1] == pytest.approx([-2 / root, 2 / root], rel=1e-14)


def test_gdpo_weighs_the_parts_it_is_given():
    judged = with_parts({"a": [0.0, 1.0], "b": [0.0, 4.0], "c": [9.0, 0.0]})
    # 3 x (-1, 1) - 1 x (-1, 1) = (-2, 2), which the batch's deviation makes (-1, 1).
    assert of_groups(functools.partial(gdpo, weights={"a": 3.0, "b": -1.0}), judged) == [[-1.0, 1.0]]
    assert of_groups(functools.partial(gdpo, weights={"a": 0.0, "b": -1.0}), judged) == [[1.0, -1.0]]
    # All parts: (-1, 1) + (-1, 1) + (1, -1).
    assert of_groups(gdpo, judged) == [[-1.0, 1.0]]


def test_gdpo_where_there_is_nothing_to_compare():
    alone, equal = with_parts({"a": [0.7], "b": [1.0]}), with_parts({"a": [0.1 + 0.2, 0.3], "b": [2.0, 2.0]})
    assert of_groups(gdpo, alone, equal) == [[0.0], [0.0, 0.0]]
    numbers = [0.1, 0.5, 0.9, 0.3]
    opposed = with_parts({"a": numbers, "b": [1 - number for number in numbers]})
    assert of_groups(gdpo, opposed) == [[0.0] * 4]  # parts that cancel up to rounding
    taught = with_parts({"a": [0.0, 1.0], "b": [0.0, 0.0]}, id="0/1")
    assert of_groups(gdpo, equal, taught)[0] == [0.0, 0.0]


def test_gdpo_without_the_parts_it_needs_is_refused():
    for judged, estimator, message in (
        (played([1.0, 0.0], [1, 1]), gdpo, "gdpo: the rollouts of group 0/0 have no reward part in common; let the re"),
        (played([1.0, 0.0], [1, 1], [{"a": 1.0}, {"b": 1.0}]), gdpo, "have no reward part in common"),
        (
            with_parts({"a": [0.0, 1.0]}),
            functools.partial(gdpo, weights={"exact": 1.0}),
            "reward part 'exact': rollout 0/0/0 has 'a'; let the reward return (rewards, parts)",
        ),
        (with_parts({"a": [0.0, 1.0]}), functools.partial(gdpo, weights={}), "weights={}: weigh nothing"),
        (with_parts({"a": [0.0, 1.0]}), functools.partial(gdpo, weights={"a": 0.0}), "weigh nothing; give finite"),
        (with_parts({"a": [0.0, 1.0]}), functools.partial(gdpo, weights={"a": float("inf")}), "weigh nothing"),
    ):
        with pytest.raises(ValueError) as caught:
            of_groups(estimator, judged)
        assert message in str(caught.value)


parts_of_groups = st.lists(
    st.integers(1, 6).flatmap(
        lambda size: st.fixed_dictionaries(
            {
                name: st.lists(st.floats(-5, 5).map(lambda x: round(x, 2)), min_size=size, max_size=size)
                for name in ("exact", "format", "length")
            }
        )
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, derandomize=True)
@given(groups=parts_of_groups, weights=st.tuples(st.floats(0.1, 2), st.floats(-1, 1), st.floats(0, 1)))
def test_gdpo_is_its_formula(groups, weights):
    weights = dict(zip(("exact", "format", "length"), weights))
    judged = [with_parts(parts, id=f"0/{i}") for i, parts in enumerate(groups)]
    ours = of_groups(functools.partial(gdpo, weights=weights), *judged)
    for row, expected in zip(ours, reference.gdpo(groups, weights), strict=True):
        assert row == pytest.approx(expected, rel=1e-9, abs=1e-9)


def gdpo_of_trl(rewards, weights, epsilon=1e-4):
    """TRL, trl/trainer/grpo_trainer.py, multi_objective_aggregation="normalize_then_sum": groups (N, G, parts)."""
    normalised = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + epsilon)
    sums = (normalised * weights).sum(-1)
    return (sums - sums.mean()) / (sums.std(ddof=1) + epsilon)


def test_gdpo_against_trl():
    """TRL's deviations divide by n - 1: in groups of one size that of the parts cancels, and that of the batch is
    larger by sqrt(N / (N - 1)). The rest is its epsilon."""
    rng = np.random.default_rng(3)
    weights = np.array([1.0, 0.5])
    for num_groups, size in ((1, 4), (6, 8), (16, 16)):
        rewards = rng.normal(size=(num_groups, size, 2))
        judged = [
            with_parts({"a": rewards[i, :, 0].tolist(), "b": rewards[i, :, 1].tolist()}, id=f"0/{i}")
            for i in range(num_groups)
        ]
        ours = np.array(of_groups(functools.partial(gdpo, weights={"a": 1.0, "b": 0.5}), *judged))
        ratio = np.sqrt((num_groups * size - 1) / (num_groups * size))
        assert (ours * ratio).ravel() == pytest.approx(gdpo_of_trl(rewards, weights, 0.0).ravel(), rel=1e-10)
        assert (ours * ratio).ravel() == pytest.approx(gdpo_of_trl(rewards, weights).ravel(), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("estimator", [opo, SHORT, BRIEF, gdpo])
@settings(deadline=None, derandomize=True, max_examples=40)
@given(groups=st.lists(judged_rewards, min_size=1, max_size=4), random=st.randoms(use_true_random=False))
def test_the_order_of_rollouts_and_groups_changes_no_advantage(estimator, groups, random):
    def advantages(groups):
        made = [
            played(*zip(*pairs), [{"a": reward, "b": -length} for reward, length in pairs], id=f"0/{i}")
            for i, pairs in enumerate(groups)
        ]
        return of_groups(estimator, *made)

    before = advantages(groups)
    orders = [random.sample(range(len(pairs)), len(pairs)) for pairs in groups]
    shuffled = advantages([[pairs[i] for i in order] for pairs, order in zip(groups, orders, strict=True)])
    for row, order, was in zip(shuffled, orders, before, strict=True):
        assert row == pytest.approx([was[i] for i in order], rel=1e-9, abs=1e-9)
    for row, was in zip(advantages(groups[::-1]), reversed(before), strict=True):
        assert row == pytest.approx(was, rel=1e-9, abs=1e-9)


def test_masked_rollouts_count_in_their_group():
    judged = played([1.0, 0.0], [3, 1])
    judged.rollouts[0].masked = True
    assert of_groups(opo, judged) == [[0.25, -0.75]]
    assert JudgedGroup.of(judged).lengths_G.tolist() == [3.0, 1.0]

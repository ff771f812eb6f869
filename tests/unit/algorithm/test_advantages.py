"""Advantages of groups small enough to do in one's head."""

import functools
import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kit.rollouts import attempts
from tests.unit.algorithm import reference
from torchtitan_rl.algorithm import advantages as estimators
from torchtitan_rl.algorithm.advantages import (
    batch_estimator,
    estimate_advantages,
    estimator_for,
    group_centered,
    grpo,
    pass_at_k,
    reinforce,
    reinforce_pp_baseline,
    rloo,
)
from torchtitan_rl.algorithm.filters import filtered
from torchtitan_rl.config.algorithm import AlgorithmConfig, FilterConfig
from torchtitan_rl.train import step_metrics
from torchtitan_rl.types import Rollout, RolloutGroup, Task


def advantages(estimator, *rewards):
    return estimator(torch.tensor(rewards, dtype=torch.float64)).tolist()


def test_group_centered_subtracts_the_mean():
    assert advantages(group_centered, 1.0, 0.0, 0.5, 2.5) == [0.0, -1.0, -0.5, 1.5]


def test_grpo_divides_by_the_population_standard_deviation():
    # Mean 2, deviations -2, 0, 0, 2: variance (4 + 4) / 4 = 2.
    root = math.sqrt(2)
    assert torch.allclose(
        grpo(torch.tensor([0.0, 2.0, 2.0, 4.0], dtype=torch.float64)),
        torch.tensor([-root, 0.0, 0.0, root], dtype=torch.float64),
        rtol=1e-15,
        atol=0,
    )
    assert advantages(grpo, 0.0, 1.0) == [-1.0, 1.0]


def test_grpo_does_not_depend_on_the_scale_or_the_offset_of_rewards():
    one, other = advantages(grpo, 0.0, 0.25, 1.0), advantages(grpo, -8.0, -6.0, 0.0)  # the same times 8, minus 8
    assert one == pytest.approx(other, abs=1e-15)


def test_equal_rewards_teach_nothing():
    for estimator in (group_centered, grpo):
        assert advantages(estimator, 0.5, 0.5, 0.5) == [0.0, 0.0, 0.0]
        assert advantages(estimator, -3.0) == [0.0]


NOISE = [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]  # 0.30000000000000004 beside 0.3


def test_rewards_that_differ_by_rounding_are_equal_to_estimators_filter_and_metric_alike():
    assert NOISE[0] != NOISE[1]
    for std in ("population", "unbiased", "none"):
        assert advantages(functools.partial(grpo, std=std), *NOISE) == [0.0] * 4
    noise, spread = torch.tensor(NOISE, dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert [x.tolist() for x in reinforce_pp_baseline([noise, noise])] == [[0.0] * 4] * 2
    assert reinforce_pp_baseline([noise, spread])[0].tolist() == [0.0] * 4
    group = RolloutGroup(id="0/0", rollouts=attempts(0, NOISE))
    kept, left_out = filtered([group], AlgorithmConfig(filters=FilterConfig(zero_variance=True)), max_tokens=8)
    assert kept == [] and [each.left_out for each in left_out] == ["zero_variance"]
    assert step_metrics.batch_metrics([group], {})["reward/zero_std_frac"] == 1.0


@pytest.mark.parametrize("scale", [1e-9, 1.0, -1e9])
def test_a_small_spread_that_is_not_rounding_is_a_spread(scale):
    """The bound is relative, 1e-6 of the largest absolute reward."""
    assert estimators.all_equal([scale, scale * (1 + 0.9e-6)]) and not estimators.all_equal(
        [scale, scale * (1 + 1.1e-6)]
    )
    assert (
        estimators.all_equal([0.0, 0.0]) and estimators.all_equal([scale]) and not estimators.all_equal([scale, -scale])
    )
    assert not any(estimators.all_equal([1.0, other]) for other in (math.nan, math.inf, -math.inf))
    assert advantages(grpo, scale, scale * (1 + 2e-6)) == pytest.approx([-np.sign(scale), np.sign(scale)])


@pytest.mark.parametrize(
    ("epsilon", "source"),
    [
        (1e-6, "verl, verl/trainer/ppo/core_algos.py, compute_grpo_outcome_advantage"),
        (1e-6, "SkyRL, skyrl/backends/skyrl_train/utils/ppo_utils.py, compute_grpo_outcome_advantage"),
        (1e-4, "TRL, trl/trainer/grpo_trainer.py, scale_rewards='group'"),
    ],
)
def test_grpo_against_those_who_add_an_epsilon(epsilon, source):
    """They divide by the unbiased deviation plus epsilon: (std + epsilon) / std times smaller, and noise is small
    too."""

    def theirs(rewards):
        return (rewards - rewards.mean()) / (rewards.std(ddof=1) + epsilon)

    rng = np.random.default_rng(0)
    for size in (2, 3, 8, 16):
        for rewards in (rng.normal(size=size), rng.integers(0, 2, size).astype(float)):
            ours = np.array(advantages(functools.partial(grpo, std="unbiased"), *rewards))
            deviation = rewards.std(ddof=1)
            assert ours * deviation / (deviation + epsilon) == pytest.approx(theirs(rewards), rel=1e-12, abs=1e-15)
    assert abs(theirs(np.array(NOISE))).max() < 1e-9


@pytest.mark.parametrize("group_size", [3, 5, 6, 7, 12])
def test_equal_rewards_teach_nothing_where_their_mean_is_rounded(group_size):
    # Three times 0.1 is a little more than 0.3: the mean differs from each reward in the last bit, and so does the
    # standard deviation from zero. One divided by the other must not become an advantage of 1.
    for percent in range(1, 100):
        rewards = [percent / 100] * group_size
        assert max(map(abs, advantages(group_centered, *rewards))) < 1e-15
        assert advantages(grpo, *rewards) == [0.0] * group_size, percent


def estimated(estimator, *groups, roles=None):
    """Advantages of groups of rewards, through the function that training uses; `roles` by group."""
    task, roles = Task(id="t", prompt=""), roles or {}
    groups = [
        RolloutGroup(
            id=f"0/{i}",
            rollouts=[
                Rollout(id=f"0/{i}/{j}", task=task, turns=[], reward=reward, role=roles.get(i, "policy"))
                for j, reward in enumerate(rewards)
            ],
        )
        for i, rewards in enumerate(groups)
    ]
    estimate_advantages(groups, AlgorithmConfig(advantage_fn=estimator))
    return [group.advantages for group in groups]


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # The others of 3 are 0 and 1, of 0 they are 3 and 1, of 1 they are 3 and 0.
    assert advantages(rloo, 3.0, 0.0, 1.0) == [2.5, -2.0, -0.5]


def test_reinforce_is_the_reward():
    assert advantages(reinforce, 3.0, 0.0, -1.0) == [3.0, 0.0, -1.0]
    assert advantages(reinforce, 1.0, 1.0) == [1.0, 1.0]


def test_the_batchs_standard_deviation_divides_every_group_alike():
    # Centred: -1, 1 and -2, 2; squares 1, 1, 4, 4 with mean 2.5.
    root = math.sqrt(2.5)
    first, second = estimated(reinforce_pp_baseline, [0.0, 2.0], [5.0, 9.0])
    assert first == pytest.approx([-1 / root, 1 / root]) and second == pytest.approx([-2 / root, 2 / root])


def test_kinds_of_standard_deviation():
    assert advantages(functools.partial(grpo, std="none"), 0.0, 1.0) == [-0.5, 0.5]
    # Squares 1/4 and 1/4: divided by 1 for the unbiased variance, 1/2.
    root = math.sqrt(0.5)
    assert advantages(functools.partial(grpo, std="unbiased"), 0.0, 1.0) == pytest.approx([-root, root])
    with pytest.raises(ValueError, match="std='sample': .* use one of 'none', 'population', 'unbiased'"):
        grpo(torch.tensor([0.0, 1.0]), std="sample")


def test_pass_at_k_by_hand():
    # One right of four, k = 2: of the six pairs three have the right one. Mean and deviation 1/2.
    # Pairs with the right one are all rewarded: (1 - 1/2) / (1/2). With a wrong one one of three: (1/3 - 1/2) / (1/2).
    one_of_four = advantages(functools.partial(pass_at_k, k=2), 1.0, 0.0, 0.0, 0.5)
    assert one_of_four == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3], rel=1e-15)
    # Half a point is right with a lower bound: one pair of six has none right, mean 5/6, deviation sqrt(5)/6.
    lower = advantages(functools.partial(pass_at_k, k=2, correct=0.5), 1.0, 0.0, 0.0, 0.5)
    root = math.sqrt(5)
    assert lower == pytest.approx([1 / root, -1 / root, -1 / root, 1 / root])
    # Three of four right: every pair has a right one, so nothing is left to win.
    assert advantages(functools.partial(pass_at_k, k=2), 1.0, 1.0, 0.0, 1.0) == [0.0] * 4


def pass_at_k_of_the_paper(num_right, num_wrong, k):
    """(right, wrong) by the equations of the paper's section 2.4, with its mean over groups of k, in exact fractions:
    1 - mean would be all rounding where the mean is close to 1."""
    size = num_right + num_wrong
    average = 1 - Fraction(math.comb(num_wrong, k), math.comb(size, k))
    deviation = math.sqrt(average * (1 - average))
    wrong = 1 - average - Fraction(math.comb(num_wrong - 1, k - 1), math.comb(size - 1, k - 1))
    return (1 - average) / deviation, wrong / deviation


@pytest.mark.parametrize("size", [2, 5, 8, 64])
def test_pass_at_k_is_the_papers_closed_form(size):
    for k in range(1, min(size, 9)):
        for num_right in range(1, size - k + 1):  # more, and every subset has a right one
            rewards = [1.0] * num_right + [0.0] * (size - num_right)
            right, wrong = pass_at_k_of_the_paper(num_right, size - num_right, k)
            ours = advantages(functools.partial(pass_at_k, k=k), *rewards)
            assert ours == pytest.approx([right] * num_right + [wrong] * (size - num_right), rel=1e-10)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(rewards=st.lists(st.sampled_from([0.0, 0.4, 1.0, 1.5]), min_size=1, max_size=9), k=st.integers(1, 9))
def test_pass_at_k_is_the_mean_over_all_subsets(rewards, k):
    ours = advantages(functools.partial(pass_at_k, k=k), *rewards)
    assert ours == pytest.approx(reference.pass_at_k(rewards, k), rel=1e-10, abs=1e-10)
    assert math.fsum(ours) == pytest.approx(0, abs=1e-12)


def test_pass_at_k_of_one_is_grpo_and_a_small_group_learns_nothing():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0]
    assert advantages(functools.partial(pass_at_k, k=1), *rewards) == pytest.approx(advantages(grpo, *rewards))
    assert advantages(functools.partial(pass_at_k, k=3), 1.0, 0.0) == [0.0, 0.0]
    for k in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"k={k}: is no number of rollouts; use 2 or more"):
            pass_at_k(torch.tensor([1.0, 0.0]), k=k)


BASELINED = [
    group_centered,
    grpo,
    functools.partial(grpo, std="none"),
    functools.partial(grpo, std="unbiased"),
    rloo,
    reinforce_pp_baseline,
]
OF_SUBSETS = functools.partial(pass_at_k, k=2, correct=0.0)


@pytest.mark.parametrize("estimator", [*BASELINED, OF_SUBSETS])
def test_a_group_of_one_and_equal_rewards_teach_nothing(estimator):
    assert estimated(estimator, [0.7], [-3.0]) == [[0.0], [0.0]]
    for row in estimated(estimator, [0.5, 0.5, 0.5], [2.0, 2.0]):
        assert row == [0.0] * len(row)


@pytest.mark.parametrize("estimator", BASELINED)
def test_rewards_too_close_to_have_a_standard_deviation_stay_finite(estimator):
    for row in estimated(estimator, [0.0, 1e-200, 0.0]):
        assert max(map(abs, row)) < 2


@pytest.mark.parametrize("estimator", [*BASELINED, reinforce])
def test_a_reward_that_is_not_a_number_is_refused(estimator):
    with pytest.raises(ValueError, match="return one finite number per rollout, as a tensor or a list"):
        estimated(estimator, [0.0, math.nan], [0.0, 1.0])


@pytest.mark.parametrize("estimator", [lambda rewards_G: rewards_G * 1e39, lambda rewards_G: [1e39, -3.5e38]])
def test_an_advantage_that_overflows_float32_is_refused_before_a_datum_holds_it(estimator):
    with pytest.raises(ValueError, match="as a tensor or a list; these overflow float32$"):
        estimated(estimator, [1.0, 0.5])
    assert estimated(lambda rewards_G: rewards_G * 3e38, [1.0, -1.0]) == [[3e38, -3e38]]


rewards = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=1, max_size=8)


@settings(deadline=None, derandomize=True)
@given(groups=st.lists(rewards, min_size=1, max_size=4))
@example(groups=[[1.0]])
@example(groups=[[0.1, 0.1, 0.1], [0.0, 1.0]])
def test_estimators_equal_their_formulas(groups):
    # Centring cancels: the error is relative to the rewards, and a division by their deviation magnifies it.
    size = max(abs(reward) for group in groups for reward in group) + 1e-3
    for estimator, formula in (
        (group_centered, reference.group_centered),
        (rloo, reference.rloo),
        (reinforce, reference.reinforce),
        (functools.partial(grpo, std="none"), lambda rewards: reference.grpo(rewards, "none")),
    ):
        for given_, group in zip(estimated(estimator, *groups), groups, strict=True):
            assert given_ == pytest.approx(formula(group), rel=1e-10, abs=1e-10 * size)
    for kind in ("population", "unbiased"):
        for given_, group in zip(estimated(functools.partial(grpo, std=kind), *groups), groups, strict=True):
            assert given_ == pytest.approx(reference.grpo(group, kind), rel=1e-10, abs=1e-10)
    for given_, expected in zip(estimated(reinforce_pp_baseline, *groups), reference.reinforce_pp_baseline(groups)):
        assert given_ == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("estimator", [*BASELINED, reinforce, OF_SUBSETS])
@settings(deadline=None, derandomize=True, max_examples=40)
@given(groups=st.lists(rewards, min_size=1, max_size=4), random=st.randoms(use_true_random=False))
def test_the_order_of_rollouts_and_groups_changes_no_advantage(estimator, groups, random):
    before = estimated(estimator, *groups)
    orders = [random.sample(range(len(group)), len(group)) for group in groups]
    shuffled = estimated(estimator, *([group[i] for i in order] for group, order in zip(groups, orders, strict=True)))
    for row, order, was in zip(shuffled, orders, before, strict=True):
        assert row == pytest.approx([was[i] for i in order], rel=1e-9, abs=1e-12)
    for row, was in zip(estimated(estimator, *reversed(groups)), reversed(before), strict=True):
        assert row == pytest.approx(was, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", BASELINED)
@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    groups=st.lists(rewards, min_size=1, max_size=4), constants=st.lists(st.integers(-16, 16), min_size=4, max_size=4)
)
def test_a_constant_added_to_a_groups_rewards_changes_no_centred_advantage(estimator, groups, constants):
    moved = [[reward + c for reward in group] for group, c in zip(groups, constants)]
    for row, was in zip(estimated(estimator, *moved), estimated(estimator, *groups), strict=True):
        assert row == pytest.approx(was, rel=1e-9, abs=1e-9)


def test_each_role_has_its_estimator():
    config = {"solver": grpo, "judge": reinforce}
    assert estimated(config, [0.0, 1.0], [2.0, 3.0], roles={0: "solver", 1: "judge"}) == [[-1.0, 1.0], [2.0, 3.0]]
    with pytest.raises(ValueError, match="no estimator for role 'solvr', only for solver, judge; did you mean 'solv"):
        estimator_for(AlgorithmConfig(advantage_fn=config), "solvr")
    assert estimator_for(AlgorithmConfig(advantage_fn=rloo), "anything") is rloo


def test_a_batch_estimator_sees_the_groups_of_its_role_only():
    config = {"solver": reinforce_pp_baseline, "judge": reinforce}
    alone = estimated(reinforce_pp_baseline, [0.0, 2.0], [5.0, 9.0])
    mixed = estimated(config, [0.0, 2.0], [100.0, 0.0], [5.0, 9.0], roles={0: "solver", 1: "judge", 2: "solver"})
    assert mixed == [alone[0], [100.0, 0.0], alone[1]]


def test_a_batch_estimator_of_the_users_own_with_arguments():
    @batch_estimator
    def above_the_batch(rewards, *, scale):
        return [scale * (rewards_G - torch.cat(rewards).mean()) for rewards_G in rewards]

    assert estimated(functools.partial(above_the_batch, scale=2.0), [0.0, 1.0], [5.0]) == [[-4.0, -2.0], [6.0]]

    @batch_estimator
    def forgetful(rewards):
        return rewards[:1]

    with pytest.raises(ValueError, match="=forgetful: gave 1 tensors for 2 groups; return one per group, in order"):
        estimated(forgetful, [0.0, 1.0], [5.0])


def test_the_documents_example_of_an_estimator_of_ones_own():
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    (code,) = re.findall(r"```python\n(def maxrl.*?)```", page, re.DOTALL)
    scope = {}
    exec(code, scope)
    # One success of four: mean 1/4, so 3 for it and -1 for the others. No success, or only successes: nothing.
    given_ = estimated(scope["maxrl"], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0], [1.0, 1.0])
    assert given_ == [[-1.0, 3.0, -1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]

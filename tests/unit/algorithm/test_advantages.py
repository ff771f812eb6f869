"""Advantages of groups small enough to do in one's head."""

import math

import pytest
import torch

from torchtitan_rl.algorithm.advantages import group_centered, grpo


def advantages(estimator, *rewards):
    return estimator(torch.tensor(rewards, dtype=torch.float64)).tolist()


def test_group_centered_subtracts_the_mean():
    assert advantages(group_centered, 1.0, 0.0, 0.5, 2.5) == [0.0, -1.0, -0.5, 1.5]


def test_grpo_divides_by_the_population_standard_deviation():
    # Mean 2, deviations -2, 0, 0, 2: variance (4 + 4) / 4 = 2.
    root = math.sqrt(2)
    assert torch.allclose(
        grpo(torch.tensor([0.0, 2.0, 2.0, 4.0], dtype=torch.float64)),
        torch.tensor([-root, 0.0, 0.0, root], dtype=torch.float64), rtol=1e-15, atol=0)
    assert advantages(grpo, 0.0, 1.0) == [-1.0, 1.0]


def test_grpo_does_not_depend_on_the_scale_or_the_offset_of_rewards():
    one, other = advantages(grpo, 0.0, 0.25, 1.0), advantages(grpo, -8.0, -6.0, 0.0)  # the same times 8, minus 8
    assert one == pytest.approx(other, abs=1e-15)


def test_equal_rewards_teach_nothing():
    for estimator in (group_centered, grpo):
        assert advantages(estimator, 0.5, 0.5, 0.5) == [0.0, 0.0, 0.0]
        assert advantages(estimator, -3.0) == [0.0]


@pytest.mark.parametrize("group_size", [3, 5, 6, 7, 12])
def test_equal_rewards_teach_nothing_where_their_mean_is_rounded(group_size):
    # Three times 0.1 is a little more than 0.3: the mean differs from each reward in the last bit, and so does the
    # standard deviation from zero. One divided by the other must not become an advantage of 1.
    for percent in range(1, 100):
        rewards = [percent / 100] * group_size
        assert max(map(abs, advantages(group_centered, *rewards))) < 1e-15
        assert advantages(grpo, *rewards) == [0.0] * group_size, percent

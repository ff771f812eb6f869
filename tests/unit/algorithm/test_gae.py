"""Generalised advantage estimation, by hand and against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.rollouts import group, rollout, turn
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.gae import gae, with_gae
from torchtitan_rl.config.algorithm import AlgorithmConfig


def test_with_lambda_one_the_advantage_is_the_return_minus_the_value():
    advantages, returns = gae(torch.tensor([9.0, 0.25, 0.5]), torch.tensor([0.0, 1.0, 1.0]), 1.0, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [0.0, 0.75, 0.5] and returns.tolist() == [0.0, 1.0, 1.0]


def test_with_lambda_zero_it_is_the_one_step_error():
    advantages, returns = gae(torch.tensor([0.25, 0.5]), torch.ones(2), 1.0, gamma=0.5, lam=0.0)
    assert advantages.tolist() == [0.5 * 0.5 - 0.25, 1.0 - 0.5] and returns.tolist() == [0.25, 1.0]


def test_tokens_of_an_environment_are_passed_over():
    """The step before the observation bootstraps from the value after it, not from a token nobody chose."""
    advantages, _ = gae(torch.tensor([0.1, 77.0, 0.4]), torch.tensor([1.0, 0.0, 1.0]), 0.0, gamma=1.0, lam=0.0)
    assert advantages.tolist() == pytest.approx([0.4 - 0.1, 0.0, -0.4])


def test_nothing_to_train_gives_nothing():
    advantages, returns = gae(torch.tensor([3.0]), torch.zeros(1), 1.0, gamma=1.0, lam=0.5)
    assert advantages.tolist() == returns.tolist() == [0.0]


@settings(deadline=None, derandomize=True)
@given(
    values=st.lists(st.floats(-3, 3), min_size=1, max_size=12),
    reward=st.floats(-2, 2),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
)
def test_it_is_the_discounted_sum_of_temporal_differences(values, reward, gamma, lam):
    """Equation 16 of the paper, summed term by term."""
    length = len(values)
    deltas = [(reward if t == length - 1 else gamma * values[t + 1]) - values[t] for t in range(length)]
    expected = [sum((gamma * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]
    advantages, returns = gae(torch.tensor(values), torch.ones(length), reward, gamma=gamma, lam=lam)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-4)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(expected, values)], abs=1e-4)


def gae_over_a_mask(rewards, values, mask, gamma, lam):
    """In float64 as verl/trainer/ppo/core_algos.py, compute_gae_advantage_return, has it before it whitens: what
    follows a token without a mask is what followed it."""
    next_value = next_advantage = 0.0
    advantages = np.zeros(len(values))
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * next_value - values[t]
        advantage = delta + gamma * lam * next_advantage
        next_value = values[t] if mask[t] else next_value
        next_advantage = advantage if mask[t] else next_advantage
        advantages[t] = next_advantage
    return advantages * mask, (advantages + values) * mask


@pytest.mark.parametrize("seed", range(10))
def test_it_is_what_verl_computes_before_it_whitens(seed):
    rng = np.random.default_rng(seed)
    values, mask = rng.normal(size=12), rng.integers(0, 2, 12)
    mask[7] = 1
    rewards = np.zeros(12)
    rewards[mask.nonzero()[0][-1]] = 1.5
    found = gae(torch.tensor(values), torch.tensor(mask, dtype=torch.float32), 1.5, gamma=0.9, lam=0.8)
    for ours, theirs in zip(found, gae_over_a_mask(rewards, values, mask, 0.9, 0.8)):
        assert ours.tolist() == pytest.approx(theirs.tolist(), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.5, 0.0)])
def test_a_rollout_of_two_datums_is_one_episode_with_one_reward(gamma, lam):
    """The second turn does not extend the first: two datums, of 3 and 2 sampled tokens, which GAE sees one after
    another."""
    two = rollout("0/0/0", turn([1], [2, 3, 4]), turn([9], [5, 6]), reward=2.0)
    other = rollout("0/0/1", turn([1], [7]), reward=-1.0)
    data = to_datums([group(two, other)], AlgorithmConfig())
    assert [datum.rollout for datum in data] == [0, 0, 1]
    values = [torch.tensor([0.25, 0.5, -0.5]), torch.tensor([1.0, 0.75]), torch.tensor([0.5])]
    config = AlgorithmConfig(gae_gamma=gamma, gae_lambda=lam)
    *of_two, of_other = with_gae(data, [2.0, 2.0, -1.0], values, config)
    rewards, joined = np.array([0.0, 0, 0, 0, 2.0]), torch.cat(values[:2]).numpy().astype(np.float64)
    expected = gae_over_a_mask(rewards, joined, np.ones(5), gamma, lam)
    for name, numbers in zip(("advantages", "returns"), expected):
        found = torch.cat([datum.loss_inputs[name] for datum in of_two])
        assert found.tolist() == pytest.approx(numbers.tolist(), abs=1e-6)
    assert of_other.loss_inputs["advantages"].tolist() == [-1.5]
    if lam == 0.0:  # by hand: the first datum ends in what the critic expects of the second, not in the reward
        assert of_two[0].loss_inputs["advantages"].tolist() == [0.5 * 0.5 - 0.25, 0.5 * -0.5 - 0.5, 0.5 * 1.0 + 0.5]
        assert of_two[1].loss_inputs["advantages"].tolist() == [0.5 * 0.75 - 1.0, 2.0 - 0.75]

"""Generalised advantage estimation, by hand and against its definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.algorithm.gae import gae


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

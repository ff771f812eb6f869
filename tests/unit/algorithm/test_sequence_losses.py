"""GMPO and VESPO: values and gradients by hand, against reference.py, and against what other projects compute."""

import math

import numpy as np
import pytest
import torch

from tests.unit.algorithm import reference
from tests.unit.algorithm.test_formulas import TOLERANCE, batch, over_ragged_batches, packed
from tests.unit.algorithm.test_proximal import gradient, padded, with_sequence_mean
from torchtitan_rl.algorithm import losses


def rows_of(log_ratios, advantages, weight):
    """One sequence whose first token is masked."""
    length = len(log_ratios)
    return {
        "mask": [0, *[1] * length],
        "policy": [-9.0, *(-2.0 + x for x in log_ratios)],
        "old": [0.0, *[-2.0] * length],
        "sampling": [0.0, *[-2.0] * length],
        "advantage": [0.0, *advantages],
        "weight": [0.0, *[weight] * length],
    }


def test_gmpo_holds_each_log_ratio_before_the_mean_on_the_side_that_pays():
    # A = 2: 0.9 is held at 0.4, -0.9 is not; the mean is -0.25. A = -1: -0.9 is held at -0.4, 0.9 is not: 0.25.
    inputs = packed([rows_of([0.9, -0.9], [2.0, 2.0], 0.25), rows_of([0.9, -0.9], [-1.0, -1.0], 0.25)], torch.float64)
    loss, metrics = losses.gmpo(inputs)
    low, high = math.exp(-0.25), math.exp(0.25)
    assert loss.item() == pytest.approx(-(0.5 * low * 2 - 0.5 * high), rel=1e-12)
    expected = [0, 0, -0.25 * low * 2, 0, 0.25 * high, 0]
    assert gradient(losses.gmpo, inputs).tolist() == pytest.approx(expected, rel=1e-12)
    assert metrics["policy/clip_frac"] == 2


def test_advantages_that_cancel_within_a_sequence_train():
    inputs = packed([rows_of([0.0] * 4, [1.0, 0.0, 0.0, -1.0], 0.25)], torch.float64)
    assert gradient(losses.gmpo, inputs).tolist() == [0.0, -0.25, 0.0, 0.0, 0.25]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("config", [{}, {"log_clip_low": 0.1, "log_clip_high": 2.0}])
@over_ragged_batches
def test_the_gradient_of_gmpo(config, dtype, ragged, seed, spread):
    sequences = batch(ragged, seed, spread, dtype)
    rng = np.random.default_rng(seed)
    if seed % 2:  # signs that differ within a sequence
        for sequence in sequences:
            sequence["advantage"] = torch.tensor(rng.normal(size=len(sequence["mask"])), dtype=dtype).tolist()
    inputs = packed(sequences, dtype)
    expected = reference.gmpo_gradient(sequences, **config)
    expected_T = torch.tensor([x for row in expected for x in row], dtype=torch.float64)
    difference_T = gradient(losses.gmpo, inputs, **config).double() - expected_T
    assert (difference_T.abs() <= TOLERANCE[dtype] * expected_T.abs()).all()


def test_with_one_advantage_per_sequence_the_gradient_is_that_of_the_sequences_ratio():
    """By finite differences: none of the log-ratios is at a bound."""
    fixed = packed([rows_of([0.7, -0.2, 0.1], [1.5] * 3, 0.125), rows_of([-0.6, 0.5], [-0.5] * 2, 0.25)], torch.float64)

    def loss(policy_logprobs):
        fixed.policy_logprobs = policy_logprobs
        return losses.gmpo(fixed)[0]

    assert torch.autograd.gradcheck(loss, [fixed.policy_logprobs])


def gmpo_of_verl(policy, old, advantages, mask, low, high):
    """verl 0.9.1, verl/trainer/ppo/core_algos.py, `compute_policy_loss_geo_mean`, but for its 1e-8 beside lengths."""
    log_ratio, sign = policy - old, np.sign(advantages)
    bounded = sign * np.minimum(sign * log_ratio, sign * np.clip(log_ratio, -low, high))
    lengths_B = mask.sum(1)
    ratio_B = np.exp((bounded * mask).sum(1) / lengths_B)
    return (-(advantages * mask).sum(1) / lengths_B * ratio_B).mean()


def gmpo_of_trl(policy, old, advantages, mask, low, high):
    """TRL 1.16.0, trl/experimental/gmpo/gmpo_trainer.py, `_compute_loss` without a KL: one advantage per sequence."""
    advantages_B1 = advantages[:, :1]
    log_ratio = policy - old
    held = np.clip(log_ratio, -low, high)
    bounded = np.where(advantages_B1 > 0, np.minimum(log_ratio, held), np.maximum(log_ratio, held))
    ratio_B = np.exp((bounded * mask).sum(1) / mask.sum(1).clip(1.0))
    return (-ratio_B * advantages_B1[:, 0]).mean()


@pytest.mark.parametrize("theirs", [gmpo_of_verl, gmpo_of_trl])
@pytest.mark.parametrize("bounds", [(0.4, 0.4), (0.2, 0.28)])
@pytest.mark.parametrize("seed", range(4))
def test_gmpo_is_that_of_verl_and_trl(seed, bounds, theirs):
    sequences = with_sequence_mean(batch([[1, 1, 0, 1], [1], [0, 1, 1, 1, 1], [1, 1]], seed, 1.0, torch.float64))
    for sequence in sequences:
        sequence["advantage"] = [sequence["advantage"][0]] * len(sequence["mask"])
    loss, _ = losses.gmpo(packed(sequences, torch.float64), log_clip_low=bounds[0], log_clip_high=bounds[1])
    assert loss.item() == pytest.approx(theirs(*padded(sequences), *bounds), rel=1e-12)


@pytest.mark.parametrize(
    ("log_ratios", "advantage", "factor"),
    [
        ([0.3, -0.3], 1.0, 1.0),  # the product is 1
        ([math.log(2), 0.0], 1.0, 4 * math.exp(-3)),
        ([math.log(2), 0.0], -1.0, 8 * math.exp(-2)),
        ([-math.log(2), -math.log(2)], 1.0, math.exp(3 * 0.75) / 16),
        ([-math.log(2), -math.log(2)], -1.0, math.exp(2 * 0.75) / 64),
        ([math.log(2), 0.0], 0.0, 4 * math.exp(-3)),
    ],
)
def test_the_factor_of_vespo(log_ratios, advantage, factor):
    inputs = packed([rows_of(log_ratios, [advantage] * 2, 0.25)], torch.float64)
    loss, metrics = losses.vespo(inputs)
    logprobs = sum(-2.0 + x for x in log_ratios)
    assert loss.item() == pytest.approx(-0.25 * factor * advantage * logprobs, rel=1e-12) and metrics == {}
    expected = [0.0] + [-0.25 * factor * advantage] * 2
    assert gradient(losses.vespo, inputs).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_factor_of_vespo_follows_the_sign_of_each_token():
    inputs = packed([rows_of([math.log(2), 0.0], [1.0, -1.0], 0.25)], torch.float64)
    expected = [0.0, -0.25 * 4 * math.exp(-3), 0.25 * 8 * math.exp(-2)]
    assert gradient(losses.vespo, inputs).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("config", [{}, {"k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.0, "lambda_neg": 4.0}])
@over_ragged_batches
def test_vespo(config, dtype, ragged, seed, spread):
    """Within the tolerance of the loss without its factor, which is at most 1.5 here: far away it underflows."""
    sequences = batch(ragged, seed, spread, dtype)
    inputs = packed(sequences, dtype)
    loss, _ = losses.vespo(inputs, **config)
    sizes_T = (inputs.token_weights * inputs.advantages).abs().detach().double()
    largest = (sizes_T * inputs.policy_logprobs.detach().double().abs()).sum().item()
    assert abs(loss.item() - reference.vespo(sequences, **config)) <= TOLERANCE[dtype] * 1.5 * largest
    expected = [x for row in reference.vespo_gradient(sequences, **config) for x in row]
    (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    difference_T = (gradient_T.double() - torch.tensor(expected, dtype=torch.float64)).abs()
    assert (difference_T <= TOLERANCE[dtype] * 1.5 * sizes_T).all()


def vespo_of_trl(policy, old, advantages, mask, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0):
    """TRL 1.16.0, trl/trainer/grpo_trainer.py, `get_gamma_weights` and `loss_type="vespo"` without a vLLM correction,
    averaged over tokens: (loss, the factor of each sequence). The authors' code
    (FloyedShen/VESPO, recipe/vespo/code/core_algos.py) holds the product's logarithm at -20, not log(1e-8)."""
    log_weight = np.clip((np.clip(policy - old, -20, 20) * mask).sum(1, keepdims=True), np.log(1e-8), 20)
    k, lam = np.where(advantages >= 0, k_pos, k_neg), np.where(advantages >= 0, lambda_pos, lambda_neg)
    factor = np.exp(lam + k * log_weight - lam * np.exp(log_weight))
    return (-factor * advantages * policy * mask).sum() / mask.sum()


@pytest.mark.parametrize("config", [{}, {"k_pos": 1.0, "lambda_pos": 2.0, "k_neg": 2.5, "lambda_neg": 1.5}])
@pytest.mark.parametrize("seed", range(4))
def test_vespo_is_that_of_trl(seed, config):
    sequences = batch([[1, 1, 0, 1], [1], [0, 1, 1, 1, 1], [1, 1]], seed, 0.5, torch.float64)
    total = sum(sum(s["mask"]) for s in sequences)
    sequences = [{**s, "weight": [m / total for m in s["mask"]]} for s in sequences]
    loss, _ = losses.vespo(packed(sequences, torch.float64), **config)
    assert loss.item() == pytest.approx(vespo_of_trl(*padded(sequences), **config), rel=1e-12)


def test_the_gradient_of_vespo_by_finite_differences():
    """At W = k / lambda the factor has its maximum, so that finite differences see what the stopped gradient leaves."""
    positive, negative = math.log(2 / 3), math.log(3 / 2)
    rows = [rows_of([positive + 0.2, -0.2], [1.5] * 2, 0.25), rows_of([negative - 0.1, 0.3, -0.2], [-0.5] * 3, 0.125)]
    fixed = packed(rows, torch.float64)

    def loss(policy_logprobs, weights, advantages):
        fixed.policy_logprobs = policy_logprobs
        fixed.tensors |= {"token_weights": weights, "advantages": advantages}
        return losses.vespo(fixed)[0]

    assert torch.autograd.gradcheck(loss, [fixed.policy_logprobs, fixed.token_weights, fixed.advantages])

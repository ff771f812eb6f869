"""SAPO: values and gradients by hand, against reference.py, and against what TRL, verl and SkyRL compute."""

import math

import numpy as np
import pytest
import torch

from tests.unit.algorithm import reference
from tests.unit.algorithm.test_formulas import TOLERANCE, batch, over_ragged_batches, packed
from torchtitan_rl.algorithm import losses


def one_token(ratio, advantage, old=-1.0, weight=1.0):
    row = {"mask": [1], "policy": [old + math.log(ratio)], "old": [old], "sampling": [old]}
    return packed([{**row, "advantage": [advantage], "weight": [weight]}], torch.float64)


def gradient(loss_fn, inputs, **config):
    return torch.autograd.grad(loss_fn(inputs, **config)[0], inputs.policy_logprobs)[0]


def close_gradients(inputs, gradient_T, expected, dtype):
    """Within the tolerance of the importance-sampled gradient's size, w x max(r, 1) x |A|."""
    ratio_T = (inputs.policy_logprobs - inputs.old_logprobs).detach().double().exp().clamp(min=1.0)
    scale_T = inputs.token_weights.detach().double() * ratio_T * inputs.advantages.detach().double().abs()
    expected_T = torch.tensor([x for row in expected for x in row], dtype=torch.float64)
    assert ((gradient_T.double() - expected_T).abs() <= TOLERANCE[dtype] * scale_T).all()


def padded(sequences):
    """(policy, old, advantages, mask), float64 of shape (sequences, longest), as the projects' losses take them."""
    longest = max(len(s["mask"]) for s in sequences)
    return [
        np.array([s[name] + [0.0] * (longest - len(s["mask"])) for s in sequences])
        for name in ("policy", "old", "advantage", "mask")
    ]


def sequence_mean(per_token_BT, mask_BT):
    """TRL's and verl's mean: over each sequence's tokens, then over sequences with a token."""
    lengths_B = mask_BT.sum(1)
    return ((per_token_BT * mask_BT).sum(1)[lengths_B > 0] / lengths_B[lengths_B > 0]).mean()


def with_sequence_mean(sequences):
    """The weights of `reductions.sequence_mean` in place of the drawn ones."""
    return [{**s, "weight": [m / max(sum(s["mask"]), 1) / len(sequences) for m in s["mask"]]} for s in sequences]


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.0, 3.0, 2.0 * 3.0, 3.0),  # 4 / tau x 1/2; the slope of the ratio itself
        (1.0, -3.0, -2.0 / 1.05 * 3.0, -3.0),
        (1.0 + math.log(3), 1.0, 4 * 0.75, 4 * 0.75 * 0.25 * (1 + math.log(3))),  # sigmoid(log 3) = 3/4
        (1.0 + math.log(3) / 1.05, -1.0, -4 / 1.05 * 0.75, -4 * 0.75 * 0.25 * (1 + math.log(3) / 1.05)),
        (1.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_gate_of_sapo(ratio, advantage, objective, slope):
    inputs = one_token(ratio, advantage, weight=0.5)
    loss, metrics = losses.sapo(inputs)
    assert loss.item() == pytest.approx(-0.5 * objective, rel=1e-12) and metrics == {}
    assert gradient(losses.sapo, inputs).item() == pytest.approx(-0.5 * slope, rel=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("config", [{}, {"tau_pos": 0.5, "tau_neg": 3.0}])
@over_ragged_batches
def test_the_gradient_of_sapo(config, dtype, ragged, seed, spread):
    sequences = batch(ragged, seed, spread, dtype)
    inputs = packed(sequences, dtype)
    expected = reference.sapo_gradient(sequences, **config)
    close_gradients(inputs, gradient(losses.sapo, inputs, **config), expected, dtype)


def sapo_of_projects(policy, old, advantages, mask, tau_pos, tau_neg):
    """TRL 1.16.0, trl/trainer/grpo_trainer.py, `loss_type="sapo"`; verl 0.9.1, verl/trainer/ppo/core_algos.py,
    `compute_policy_loss_sapo`; SkyRL 0.4.0, skyrl/backends/skyrl_train/utils/ppo_utils.py, `sapo_policy_loss` with the
    reduction `sequence_mean`. verl and SkyRL hold log-ratios within +-20."""
    ratio = np.exp(np.clip(policy - old, -20, 20))
    tau = np.where(advantages > 0, tau_pos, tau_neg)
    return sequence_mean(-(1 / (1 + np.exp(-tau * (ratio - 1)))) * 4 / tau * advantages, mask)


@pytest.mark.parametrize("config", [{}, {"tau_pos": 2.0, "tau_neg": 2.5}])
@pytest.mark.parametrize("seed", range(5))
def test_sapo_is_that_of_trl_verl_and_skyrl(seed, config):
    sequences = with_sequence_mean(batch([[1, 1, 0, 1], [1], [0, 1, 1, 1, 1], [1, 1]], seed, 1.0, torch.float64))
    loss, _ = losses.sapo(packed(sequences, torch.float64), **config)
    taus = {"tau_pos": 1.0, "tau_neg": 1.05, **config}
    assert loss.item() == pytest.approx(sapo_of_projects(*padded(sequences), **taus), rel=1e-12)

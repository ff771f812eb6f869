"""SAPO and DPPO: values and gradients by hand, against reference.py, and against what other projects compute."""

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


@pytest.mark.parametrize(
    ("policy", "old", "advantage", "kept"),
    [
        (0.75, 0.5, 1.0, False),  # risen by 0.25, and it would pay
        (0.65, 0.5, 1.0, True),
        (0.75, 0.5, -1.0, True),  # risen, and the way back pays
        (0.25, 0.5, -1.0, False),
        (0.35, 0.5, -1.0, True),
        (0.25, 0.5, 1.0, True),
        (0.01, 0.0001, 1.0, True),  # a ratio of 100, which any clip holds, is no change of the distribution
        (0.99, 0.75, 1.0, False),  # a ratio of 1.32
        (0.5, 0.5, 1.0, True),
        (0.75, 0.5, 0.0, True),
    ],
)
def test_dppo_drops_tokens_whose_probability_moved_too_far_and_would_move_on(policy, old, advantage, kept):
    inputs = one_token(policy / old, advantage, old=math.log(old), weight=0.5)
    loss, metrics = losses.dppo_tv(inputs)
    objective = policy / old * advantage if kept else 0.0
    assert loss.item() == pytest.approx(-0.5 * objective, rel=1e-12)
    assert gradient(losses.dppo_tv, inputs).item() == pytest.approx(-0.5 * objective, rel=1e-12)
    assert metrics["policy/clip_frac"] == (not kept)


def test_the_binary_kl_by_hand():
    # KL of (1/2, 1/2) to (3/4, 1/4) is log(2 / sqrt(3)) = 0.1438.
    inputs = one_token(1.5, 1.0, old=math.log(0.5))
    divergence = math.log(2 / math.sqrt(3))
    assert losses.dppo_kl(inputs, delta_high=divergence + 1e-9)[0].item() == pytest.approx(-1.5)
    assert losses.dppo_kl(inputs, delta_high=divergence - 1e-9)[0].item() == 0.0


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_certain_token_has_a_divergence(dtype):
    """From 1/2 to 1 the KL is infinite, log 2 the other way round, and 0 where nothing moved."""
    rows = {"mask": [1] * 3, "policy": [0.0, math.log(0.5), 0.0], "old": [math.log(0.5), 0.0, 0.0]}
    rows |= {"sampling": rows["old"], "advantage": [1.0, -1.0, 1.0], "weight": [1.0] * 3}
    for delta, dropped, objective in ((0.5, 2, 1.0), (0.7, 1, 1.0 - 0.5), (math.inf, 0, 1.0 - 0.5 + 2.0)):
        loss, metrics = losses.dppo_kl(packed([rows], dtype), delta_low=delta, delta_high=delta)
        assert loss.item() == pytest.approx(-objective) and metrics["policy/clip_frac"] == dropped


def test_a_cap_holds_the_ratio_of_a_tokens_gradient():
    inputs = one_token(50.0, 1.0, old=math.log(1e-4))
    assert losses.dppo_tv(inputs)[0].item() == pytest.approx(-50.0)
    assert losses.dppo_tv(inputs, cap=20.0)[0].item() == pytest.approx(-20.0)
    assert gradient(losses.dppo_tv, inputs, cap=20.0).item() == pytest.approx(-20.0)


DIVERGENCES = {"dppo_tv": (reference.total_variation, 0.2), "dppo_kl": (reference.binary_kl, 0.05)}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("config", [{}, {"delta_low": 0.01, "delta_high": 0.3, "cap": 3.0, "tau": 0.25}])
@pytest.mark.parametrize("name", DIVERGENCES)
@over_ragged_batches
def test_the_gradient_of_dppo(name, config, dtype, ragged, seed, spread):
    sequences = batch(ragged, seed, spread, dtype)
    divergence, delta = DIVERGENCES[name]
    arguments = {"delta_low": delta, "delta_high": delta, "cap": math.inf, "tau": 0.0, **config}
    expected_T = torch.tensor(reference.dppo(sequences, divergence, **arguments)[1], dtype=torch.float64)
    inputs = packed(sequences, dtype)
    difference_T = gradient(getattr(losses, name), inputs, **config).double() - expected_T
    largest_T = inputs.token_weights.detach().double() * spread  # of two terms that may cancel
    assert (difference_T.abs() <= TOLERANCE[dtype] * (expected_T.abs() + largest_T)).all()


def dppo_of_prime_rl(policy, old, advantages, mask, low, high, tau):
    """prime-rl, src/prime_rl/trainer/rl/loss.py, `default_loss_fn` without a teacher, divided by the batch's tokens."""
    risen = np.exp(policy) - np.exp(old)
    invalid = np.where(advantages > 0, risen > high, risen < -low)
    per_token = -(~invalid * advantages * np.exp(policy - old)) + tau * (policy - old) ** 2
    return (per_token * mask).sum() / mask.sum()


def dppo_of_skyrl(policy, old, advantages, mask, low, high, binary):
    """SkyRL 0.4.0, skyrl/backends/skyrl_train/utils/ppo_utils.py, `dppo_policy_loss`, averaged over tokens; the KL has
    1e-8 inside its logarithm."""
    p, mu = np.exp(policy), np.exp(old)
    divergence = mu * (old - policy) + (1 - mu) * np.log((1 - mu + 1e-8) / (1 - p + 1e-8))
    divergence = divergence if binary == "kl" else np.abs(p - mu)
    dropped = ((advantages > 0) & (p > mu) & (divergence > high)) | ((advantages < 0) & (p < mu) & (divergence > low))
    return (-np.exp(policy - old) * advantages * ~dropped * mask).sum() / mask.sum()


def with_token_mean(sequences):
    total = sum(sum(s["mask"]) for s in sequences)
    return [{**s, "weight": [m / total for m in s["mask"]]} for s in sequences]


@pytest.mark.parametrize("seed", range(6))
def test_dppo_is_that_of_prime_rl_and_skyrl(seed):
    sequences = with_token_mean(batch([[1, 1, 0, 1], [1], [0, 1, 1, 1, 1], [1, 1]], seed, 1.0, torch.float64))
    for sequence in sequences:  # likelier tokens, so that some move far
        sequence.update({name: [min(x / 8, -0.01) for x in sequence[name]] for name in ("policy", "old")})
    columns, inputs = padded(sequences), packed(sequences, torch.float64)
    deltas = {"delta_low": 0.02, "delta_high": 0.03}
    loss, metrics = losses.dppo_tv(inputs, tau=1e-3, **deltas)
    assert loss.item() == pytest.approx(dppo_of_prime_rl(*columns, 0.02, 0.03, 1e-3), rel=1e-12)
    assert 0 < metrics["policy/clip_frac"] < sum(sum(s["mask"]) for s in sequences)
    assert losses.dppo_tv(inputs, **deltas)[0].item() == pytest.approx(
        dppo_of_skyrl(*columns, 0.02, 0.03, "tv"), rel=1e-12
    )
    assert losses.dppo_kl(inputs, delta_low=1e-3, delta_high=2e-3)[0].item() == pytest.approx(
        dppo_of_skyrl(*columns, 1e-3, 2e-3, "kl"), rel=1e-12
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_dppo_is_that_of_verl(seed):
    """verl 0.9.1, verl/trainer/ppo/core_algos.py, `compute_policy_loss_dppo_tv`: the ratio, held at `clip_ratio_c`, is
    a constant beside the log-probability, so the values differ and the gradients agree."""
    sequences = with_token_mean(batch([[1, 1, 0, 1], [1], [0, 1, 1, 1, 1], [1, 1]], seed, 2.0, torch.float64))
    policy, old, advantages, mask = padded(sequences)
    risen = np.exp(policy) - np.exp(old)
    valid = np.where(advantages > 0, risen <= 0.05, risen >= -0.05)
    expected = -advantages * np.minimum(np.exp(policy - old), 3.0) * valid * mask / mask.sum()
    flat = [x for row, s in zip(expected, sequences) for x in row[: len(s["mask"])]]
    arguments = {"delta_low": 0.05, "delta_high": 0.05, "cap": 3.0}
    found = gradient(losses.dppo_tv, packed(sequences, torch.float64), **arguments)
    assert found.tolist() == pytest.approx(flat, rel=1e-12)

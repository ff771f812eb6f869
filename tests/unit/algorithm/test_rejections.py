"""Corrections with factors 1 and 0, by hand and against what SkyRL, verl, TRL and slime compute."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.unit.algorithm.test_formulas import batch, packed
from tests.unit.algorithm.test_loss_sums import MASKS, answer
from tests.unit.algorithm.test_objective import loss_and_gradient, mismatched
from tests.unit.algorithm.test_proximal import padded
from torchtitan_rl.algorithm import corrections, losses
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.algorithm.reductions import token_mean
from torchtitan_rl.algorithm.terms import with_kept_weights
from torchtitan_rl.config.algorithm import AlgorithmConfig


def row(*rhos, policy=None, advantage=1.0):
    """A sequence with a masked token before tokens of these weights; `policy` is log-ratios to the generator."""
    length = len(rhos)
    return {
        "mask": [0, *[1] * length],
        "policy": [9.0, *(-1.0 + x for x in policy or [0.0] * length)],
        "old": [9.0, *(-1.0 + math.log(rho) for rho in rhos)],
        "sampling": [0.0, *[-1.0] * length],
        "advantage": [-9.0, *[advantage] * length],
        "weight": [0.0, *[1.0] * length],
    }


def factors(correction_fn, rows, **config):
    """(factors of the trained tokens of each row, metric sums)."""
    factor_T, metrics = correction_fn(packed(rows, torch.float64), **config)
    parts = factor_T.split([len(r["mask"]) for r in rows])
    assert not factor_T.requires_grad
    return [part[1:].tolist() for part in parts], {name: float(x) for name, x in metrics.items()}


ROWS = [row(4 / 3, 0.75), row(1.5, 1.5), row(1.005, 1.0), row(1e-5, 1.0), row(1.0, 200.0), row(1.02)]


@pytest.mark.parametrize(
    ("correction_fn", "kept"),
    [
        (corrections.reject_token, [[1, 1], [1, 1], [1, 1], [0, 1], [1, 0], [1]]),
        # Products 1, 2.25, 1.005, 1e-5, 200, 1.02.
        (corrections.reject_sequence, [[1, 1], [0, 0], [1, 1], [0, 0], [0, 0], [1]]),
        # Means 1, 1.5, 1.0025, 0.003, 14, 1.02.
        (corrections.reject_geometric, [[1, 1], [0, 0], [1, 1], [0, 0], [0, 0], [0]]),
        (corrections.reject_outlier, [[1, 1], [1, 1], [1, 1], [0, 0], [0, 0], [1]]),
    ],
)
def test_factors_by_hand(correction_fn, kept):
    by_row, metrics = factors(correction_fn, ROWS)
    assert by_row == kept
    tokens = [x for part in kept for x in part]
    assert metrics == {"correction/weight_mean": sum(tokens), "correction/changed_frac": tokens.count(0)}


def test_opsm_drops_negative_sequences_that_the_policy_no_longer_says():
    rows = [
        row(1.0, 1.0, policy=[-0.3, -0.1], advantage=-1.0),  # mean of generator - policy 0.2
        row(1.0, 1.0, policy=[-0.3, -0.1], advantage=1.0),  # it pays
        row(1.0, 1.0, policy=[0.3, 0.1], advantage=-1.0),  # the policy says it more often
        row(1.0, 1.0, policy=[-0.3, 0.2], advantage=-1.0),  # 0.05
    ]
    assert factors(corrections.opsm, rows, delta=0.1)[0] == [[0, 0], [1, 1], [1, 1], [1, 1]]
    assert factors(corrections.opsm, rows, delta=0.0)[0] == [[0, 0], [1, 1], [1, 1], [0, 0]]
    mixed = row(1.0, 1.0, policy=[-0.3, -0.1])
    mixed["advantage"] = [0.0, 1.0, -1.0]
    factor_T, _ = corrections.opsm(packed([mixed], torch.float64), delta=0.1)
    assert factor_T.tolist() == [1.0, 1.0, 0.0]  # equation 9 is by token


def test_both_multiplies_the_factors():
    correction_fn = partial(
        corrections.both,
        first=partial(corrections.truncated_token, cap=1.25),
        second=partial(corrections.reject_outlier, low=0.01, high=100.0),
    )
    by_row, metrics = factors(correction_fn, ROWS)
    assert by_row[:3] == [[1.25, pytest.approx(0.75)], [1.25, 1.25], [pytest.approx(1.005), 1.0]]
    assert by_row[3:] == [[0, 0], [0, 0], [pytest.approx(1.02)]]
    assert metrics["correction/weight_mean"] == pytest.approx(sum(x for part in by_row for x in part))
    assert metrics["correction/changed_frac"] == 4
    one, _ = factors(partial(corrections.both, first=correction_fn, second=corrections.reject_geometric), ROWS)
    assert one == [by_row[0], [0, 0], by_row[2], [0, 0], [0, 0], [0]]


# What other projects compute, on (sequences, tokens), with the log-ratio trainer - generator.


def of_skyrl(log_ratio, mask, kind, low, high):
    """SkyRL 0.4.0, skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py: compute_token_mask,
    compute_sequence_mask and compute_outlier_token_mask."""
    ratio = np.exp(np.clip(log_ratio, -20, 20))
    sums = (log_ratio * mask).sum(1, keepdims=True)
    if kind == "token":
        return (ratio >= low) & (ratio <= high)
    if kind == "outlier":
        return ~(((ratio < low) | (ratio > high)) & (mask > 0)).any(1, keepdims=True)
    of_sequence = np.exp(sums if kind == "product" else sums / mask.sum(1, keepdims=True).clip(1))
    return (of_sequence >= low) & (of_sequence <= high)


def of_verl(log_ratio, mask, option, lower, upper):
    """verl 0.9.1, verl/trainer/ppo/rollout_corr_helper.py, compute_rollout_rejection_mask: k1 is generator - trainer,
    and its bounds are those of exp(k1); seq_max_k2 bounds half the largest square."""
    k1 = -np.clip(log_ratio, -20, 20)
    if option == "seq_max_k2":
        return np.where(mask > 0, 0.5 * k1**2, -np.inf).max(1, keepdims=True) <= upper
    sums = (k1 * mask).sum(1, keepdims=True)
    statistic = {"token_k1": k1, "seq_sum_k1": sums, "seq_mean_k1": sums / mask.sum(1, keepdims=True).clip(1)}[option]
    return (statistic >= np.log(lower)) & (statistic <= np.log(upper))


def drawn(seed, spread):
    sequences = batch([mask for mask in MASKS if any(mask)], seed, spread, torch.float64)
    rng = np.random.default_rng(seed)
    for s in sequences:  # the old policy's log-probabilities as far from the generator's as the others'
        s["sampling"] = [x + y for x, y in zip(s["old"], rng.uniform(-spread, spread, len(s["mask"])))]
    longest = max(len(s["mask"]) for s in sequences)
    generator = np.array([s["sampling"] + [0.0] * (longest - len(s["mask"])) for s in sequences])
    policy, old, advantages, mask = padded(sequences)
    return sequences, policy, old, generator, advantages, mask


def rejected_tokens(correction_fn, sequences, mask):
    """Which trained tokens have a factor of 0, (sequences, longest)."""
    factor_T, _ = correction_fn(packed(sequences, torch.float64))
    rejected = np.zeros_like(mask, dtype=bool)
    for index, part in enumerate(factor_T.split([len(s["mask"]) for s in sequences])):
        rejected[index, : len(part)] = part.numpy() == 0
    return rejected & (mask > 0)


@pytest.mark.parametrize(
    ("correction_fn", "theirs", "spread"),
    [
        (corrections.reject_token, partial(of_skyrl, kind="token", low=0.5, high=5.0), 1.5),
        (corrections.reject_sequence, partial(of_skyrl, kind="product", low=0.5, high=2.0), 1.0),
        (corrections.reject_geometric, partial(of_skyrl, kind="geometric", low=0.99, high=1.01), 0.03),
        (corrections.reject_outlier, partial(of_skyrl, kind="outlier", low=1e-4, high=100.0), 12.0),
        (
            partial(corrections.reject_token, low=1 / 2.0, high=1 / 0.8),
            partial(of_verl, option="token_k1", lower=0.8, upper=2.0),
            1.0,
        ),
        (
            partial(corrections.reject_sequence, low=1 / 2.0, high=1 / 0.8),
            partial(of_verl, option="seq_sum_k1", lower=0.8, upper=2.0),
            0.5,
        ),
        (
            partial(corrections.reject_geometric, low=1 / 1.01, high=1 / 0.98),
            partial(of_verl, option="seq_mean_k1", lower=0.98, upper=1.01),
            0.03,
        ),
        (
            partial(corrections.reject_outlier, low=math.exp(-math.sqrt(2 * 0.1)), high=math.exp(math.sqrt(2 * 0.1))),
            partial(of_verl, option="seq_max_k2", lower=None, upper=0.1),
            0.6,
        ),
    ],
)
def test_rejections_are_those_of_skyrl_and_verl(correction_fn, theirs, spread):
    counts = []
    for seed in range(10):
        sequences, _, old, generator, _, mask = drawn(seed, spread)
        expected = ~np.broadcast_to(theirs(old - generator, mask), mask.shape) & (mask > 0)
        assert (rejected_tokens(correction_fn, sequences, mask) == expected).all()
        counts.append(expected.sum() / mask.sum())
    assert 0.05 < np.mean(counts) < 0.95


@pytest.mark.parametrize("delta", [0.0, 0.05, 0.3])
def test_opsm_is_that_of_trl_and_slime(delta):
    """TRL 1.16.0, trl/trainer/grpo_trainer.py, get_off_policy_mask: keeps A >= 0 or a mean of generator - policy of at
    most the threshold. slime, slime/utils/ppo_utils.py, compute_opsm_mask: drops A < 0 and above it; its other policy
    is the old one, which is the generator with `use_rollout_logprobs`."""
    counts = []
    for seed in range(10):
        sequences, policy, _, generator, advantages, mask = drawn(seed, 0.5)
        away = ((generator - policy) * mask).sum(1, keepdims=True) / mask.sum(1, keepdims=True).clip(1)
        of_trl = (advantages >= 0) | (away <= delta)
        of_slime = ~((advantages < 0) & (away > delta))
        rejected = rejected_tokens(partial(corrections.opsm, delta=delta), sequences, mask)
        assert (rejected == (~of_trl & (mask > 0))).all() and (rejected == (~of_slime & (mask > 0))).all()
        counts.append(rejected.sum())
    assert sum(counts) > 0


# In an objective.


REJECTIONS = [
    partial(corrections.reject_token, low=0.9, high=1.2),
    partial(corrections.reject_sequence, low=0.8, high=1.25),
    partial(corrections.reject_geometric, low=0.95, high=1.05),
    partial(corrections.reject_outlier, low=0.7, high=1.4),
    partial(corrections.opsm, delta=0.02),
    partial(corrections.both, first=corrections.truncated_token, second=corrections.reject_sequence),
]


def names(correction_fn):
    return correction_fn.func.__name__


@pytest.mark.parametrize("correction_fn", REJECTIONS, ids=names)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_split_or_another_order_changes_neither_sum_nor_gradient(correction_fn, size):
    objective = policy_objective(AlgorithmConfig(loss_fn=losses.ppo, correction_fn=correction_fn))
    rows = [{**s, "old": [x + 0.1 * y for x, y in zip(s["sampling"], s["advantage"])]} for s in drawn(size, 0.3)[0]]
    loss, gradients, metrics = answer(objective, rows)
    parts = [answer(objective, rows[start : start + size]) for start in range(0, len(rows), size)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-12)
    assert [part for of_part in parts for part in of_part[1]] == [pytest.approx(g, rel=1e-12) for g in gradients]
    backwards, of_backwards, other_metrics = answer(objective, rows[::-1])
    assert backwards == pytest.approx(loss, rel=1e-12) and of_backwards[::-1] == [
        pytest.approx(g, rel=1e-12) for g in gradients
    ]
    assert other_metrics == pytest.approx(metrics, rel=1e-12)


def test_a_rejected_token_neither_counts_nor_trains():
    rows = [row(1.0, 1.0), row(3.0, 1.0)]
    objective = policy_objective(
        AlgorithmConfig(loss_fn=losses.importance_sampling, correction_fn=corrections.reject_sequence)
    )
    loss, gradients, _ = answer(objective, rows)
    assert loss == pytest.approx(-2.0)  # weights 1, ratios of policy to old 1
    assert gradients == [pytest.approx([0, -1.0, -1.0]), [0.0] * 3]


@pytest.mark.parametrize("seed", range(5))
def test_rejection_with_the_kept_denominator_is_verls_seq_mean_k1_without_weights(seed):
    """verl takes rejected sequences out of response_mask, and the mean is over what is left (agg_loss, token-mean)."""
    data = mismatched(seed)
    config = AlgorithmConfig(
        loss_fn=losses.importance_sampling,
        correction_fn=corrections.reject_geometric,
        correction_config={"low": 0.9, "high": 1.15},
        correction_denominator="kept",
        reduction=token_mean,
    )
    total, kept, rejected = 0.0, 0, 0
    for datum in data:
        column = {name: tensor.numpy() for name, tensor in datum.loss_inputs.items()}
        mask = column["loss_mask"] > 0
        away = (column["sampling_logprobs"] - column["old_logprobs"])[mask]
        if len(away) and not math.log(1 / 1.15) <= away.mean() <= math.log(1 / 0.9):
            rejected += mask.sum()
            continue
        total -= (np.exp(column["policy"] - column["old_logprobs"]) * column["advantages"])[mask].sum()
        kept += mask.sum()
    assert kept and rejected
    loss, _ = loss_and_gradient(with_kept_weights(data, config), config)
    assert loss == pytest.approx(total / kept, rel=1e-6)

"""Losses are sums over tokens: neither the split of a batch, nor the order of its datums, nor masked tokens count."""

from functools import partial

import pytest
import torch

from tests.unit.algorithm.test_formulas import batch, packed
from torchtitan_rl.algorithm import losses

LOSSES = [
    losses.importance_sampling,
    losses.ppo,
    losses.cispo,
    losses.dro,
    partial(losses.gspo, clip_low=0.3, clip_high=0.4),
    losses.sapo,
    losses.gmpo,
    partial(losses.dppo_tv, delta_low=0.05, delta_high=0.05, tau=1e-3),
    partial(losses.dppo_kl, delta_low=0.01, delta_high=0.01),
    losses.vespo,
]
MASKS = [[1, 1, 0, 1, 1], [1, 1, 1], [0, 0], [0, 1, 1, 1, 0, 1], [1], [1, 1, 0, 0, 1, 1, 1]]


def named(loss_fn):
    return getattr(loss_fn, "func", loss_fn).__name__


def sequences(seed):
    """Six sequences of one sign of advantage each, ratios within e^0.5."""
    return batch(MASKS, seed, 0.5, torch.float64)


def answer(loss_fn, rows):
    """(loss, gradient by the log-probabilities of each row, metric sums)."""
    inputs = packed(rows, torch.float64)
    loss, metrics = loss_fn(inputs)
    (gradient_T,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    gradients = gradient_T.split([len(row["mask"]) for row in rows])
    return loss.item(), [part.tolist() for part in gradients], {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize("loss_fn", LOSSES, ids=named)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_split_into_microbatches_changes_neither_sum_nor_gradient(loss_fn, size):
    rows = sequences(size)
    loss, gradients, metrics = answer(loss_fn, rows)
    parts = [answer(loss_fn, rows[start : start + size]) for start in range(0, len(rows), size)]
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-12)
    assert [row for part in parts for row in part[1]] == [pytest.approx(row, rel=1e-12) for row in gradients]
    for name, value in metrics.items():
        assert sum(part[2][name] for part in parts) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=named)
@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
def test_the_order_of_datums_changes_neither_sum_nor_gradient(loss_fn, order):
    rows = sequences(7)
    loss, gradients, metrics = answer(loss_fn, rows)
    reordered, of_reordered, other_metrics = answer(loss_fn, [rows[index] for index in order])
    assert reordered == pytest.approx(loss, rel=1e-12) and other_metrics == pytest.approx(metrics, rel=1e-12)
    assert of_reordered == [pytest.approx(gradients[index], rel=1e-12) for index in order]


@pytest.mark.parametrize("loss_fn", LOSSES, ids=named)
def test_a_loss_is_linear_in_each_tokens_weight(loss_fn):
    """The gradient is the sum of those with one token's weight at a time."""
    rows = sequences(11)
    loss, gradients, _ = answer(loss_fn, rows)
    total, sums = 0.0, torch.zeros(sum(map(len, MASKS)), dtype=torch.float64)
    for index, row in enumerate(rows):
        for t in range(len(row["weight"])):
            alone = [{**other, "weight": [0.0] * len(other["weight"])} for other in rows]
            alone[index]["weight"][t] = row["weight"][t]
            part, of_part, _ = answer(loss_fn, alone)
            total += part
            sums += torch.tensor([x for of_row in of_part for x in of_row], dtype=torch.float64)
    assert total == pytest.approx(loss, rel=1e-12)
    assert sums.tolist() == pytest.approx([x for of_row in gradients for x in of_row], rel=1e-10, abs=1e-15)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=named)
def test_masked_tokens_might_as_well_not_be_there(loss_fn):
    rows = sequences(13)
    loss, gradients, metrics = answer(loss_fn, rows)
    trained = [
        {name: [x for x, mask in zip(column, row["mask"], strict=True) if mask] for name, column in row.items()}
        for row in rows
        if any(row["mask"])
    ]
    without, of_trained, other_metrics = answer(loss_fn, trained)
    assert without == pytest.approx(loss, rel=1e-12) and other_metrics == pytest.approx(metrics, rel=1e-12)
    kept = [[x for x, mask in zip(of_row, row["mask"], strict=True) if mask] for of_row, row in zip(gradients, rows)]
    assert of_trained == [pytest.approx(of_row, rel=1e-12) for of_row in kept if of_row]

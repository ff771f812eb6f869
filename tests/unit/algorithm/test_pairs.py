"""Pairs as datums, and the gradient of a loss of pairs as token weights: that of the loss itself, however split."""

import math
from functools import partial

import pytest
import torch

from torchtitan_rl.algorithm import pairs
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.algorithm.pair_losses import aot_unpaired, bradley_terry, dpo, ipo, robust_dpo
from torchtitan_rl.types import LossInputs

SEQUENCES = [([5, 6], [7, 8, 1]), ([5, 6], [9, 1]), ([4], [3, 3, 3, 1]), ([4], [1])]


def rows(data, seed, dtype=torch.float64):
    """A made-up log-probability, or value, for each token of each datum."""
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(len(datum), generator=generator, dtype=torch.float64).to(dtype) * 3 for datum in data]


def packed(data, outputs, *, name="policy_logprobs"):
    lengths = torch.tensor([len(datum) for datum in data])
    return LossInputs(
        **{name: torch.cat(outputs)},
        datum=torch.repeat_interleave(lengths),
        num_datums=len(data),
        tensors={n: torch.cat([d.loss_inputs[n].double() for d in data]) for n in data[0].loss_inputs},
    )


def gradients(data, outputs, loss_fn, size, name="policy_logprobs"):
    """By each output, of the token sums of microbatches of `size` datums."""
    leaves = [row.clone().requires_grad_() for row in outputs]
    for i in range(0, len(data), size):
        loss_fn(packed(data[i : i + size], leaves[i : i + size], name=name))[0].backward()
    return [leaf.grad for leaf in leaves]


def test_datums_of_a_policy_by_hand():
    data = pairs.scored_datums(SEQUENCES)
    assert [datum.tokens.tolist() for datum in data] == [[5, 6, 7, 8], [5, 6, 9], [4, 3, 3, 3], [4]]
    assert [datum.target_tokens.tolist() for datum in data] == [[6, 7, 8, 1], [6, 9, 1], [3, 3, 3, 1], [1]]
    masks = [datum.loss_inputs["loss_mask"].tolist() for datum in data]
    assert masks == [[0, 1, 1, 1], [0, 1, 1], [1, 1, 1, 1], [1]]
    assert [(datum.group, datum.rollout) for datum in data] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_datums_of_a_value_head_read_the_last_token():
    data = pairs.value_datums(SEQUENCES)
    assert [datum.tokens.tolist() for datum in data] == [[5, 6, 7, 8, 1], [5, 6, 9, 1], [4, 3, 3, 3, 1], [4, 1]]
    assert [datum.loss_inputs["loss_mask"].nonzero().flatten().tolist() for datum in data] == [[4], [3], [4], [1]]


def test_numbers_by_hand():
    data = pairs.scored_datums(SEQUENCES[:2])
    logprobs = [torch.tensor([-9.0, -1.0, -2.0, -3.0]), torch.tensor([-9.0, -0.5, -0.25])]
    assert pairs.completion_logprobs(data, logprobs).tolist() == [-6.0, -0.75]
    assert pairs.completion_logprobs(data, logprobs, mean=True).tolist() == [-2.0, -0.375]
    assert pairs.last_values(data, logprobs).tolist() == [-3.0, -0.25]


def test_the_loss_and_its_derivative_by_hand():
    loss, derivative = pairs.pair_loss(torch.tensor([2.0, 0.0, 1.0, 1.0]), partial(dpo, beta=1.0))
    # -log sigma(2) = 0.126928 and log 2, and -sigma(-2) = -0.119203, -1/2; each over two pairs.
    assert loss == pytest.approx((0.126928 + math.log(2)) / 2, abs=1e-6)
    assert derivative.tolist() == pytest.approx([-0.0596015, 0.0596015, -0.25, 0.25], abs=1e-6)


LOSSES = {
    "dpo": (partial(dpo, beta=0.3), False, 0.0),
    "robust": (partial(robust_dpo, beta=0.3), False, 0.0),
    "ipo": (ipo, True, 0.0),
    "with sft": (partial(dpo, beta=0.3), True, 0.7),
    "across pairs": (partial(aot_unpaired, beta=0.3), False, 0.2),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_gradient_is_that_of_the_loss_whatever_the_split(name, size):
    loss_fn, mean, sft_coef = LOSSES[name]
    data = pairs.scored_datums(SEQUENCES)
    policy, reference = rows(data, 0), rows(data, 1)

    # The loss as one function of all log-probabilities.
    leaves = [row.clone().requires_grad_() for row in policy]
    completions = [row[datum.loss_inputs["loss_mask"] > 0] for row, datum in zip(leaves, data)]
    reduce = torch.mean if mean else torch.sum
    of_reference = pairs.completion_logprobs(data, reference, mean=mean)
    numbers = torch.stack([reduce(row) for row in completions]) - of_reference
    loss = loss_fn(numbers[0::2], numbers[1::2]).mean() - sft_coef * torch.cat(completions[0::2]).mean()
    expected = torch.autograd.grad(loss, leaves)

    value, derivative = pairs.pair_loss(pairs.completion_logprobs(data, policy, mean=mean) - of_reference, loss_fn)
    assert value == pytest.approx(loss_fn(numbers[0::2], numbers[1::2]).mean().item(), rel=1e-12)
    weighted = pairs.with_logprob_coefficients(data, derivative, mean=mean, sft_coef=sft_coef)
    for got, want in zip(gradients(weighted, policy, cross_entropy, size), expected, strict=True):
        assert got.tolist() == pytest.approx(want.tolist(), rel=1e-6, abs=1e-8)  # weights are float32


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_gradient_by_values_is_that_of_the_loss(size):
    data, loss_fn = pairs.value_datums(SEQUENCES), partial(bradley_terry, margin=0.2, center=0.1)
    values = rows(data, 2)
    leaves = [row.clone().requires_grad_() for row in values]
    last = torch.stack([row[-1] for row in leaves])
    expected = torch.autograd.grad(loss_fn(last[0::2], last[1::2]).mean(), leaves)
    _, derivative = pairs.pair_loss(pairs.last_values(data, values), loss_fn)
    weighted = pairs.with_value_coefficients(data, derivative)
    for got, want in zip(gradients(weighted, values, pairs.value_sum, size, "predicted_values"), expected, strict=True):
        assert got.tolist() == pytest.approx(want.tolist(), rel=1e-6, abs=1e-8)


def test_prompts_have_no_gradient():
    data = pairs.scored_datums(SEQUENCES)
    policy = rows(data, 0)
    policy[0][0] = math.nan  # a prompt's
    _, derivative = pairs.pair_loss(pairs.completion_logprobs(data, policy), dpo)
    weighted = pairs.with_logprob_coefficients(data, derivative, sft_coef=1.0)
    assert gradients(weighted, policy, cross_entropy, 4)[0][0] == 0


def test_metrics_by_hand():
    metrics = pairs.pair_metrics(torch.tensor([2.0, 1.0, -1.0, 3.0, 0.5, 0.5]), 0.1)
    assert metrics == pytest.approx(
        {
            "rewards/chosen": 0.1 * 1.5 / 3,
            "rewards/rejected": 0.1 * 4.5 / 3,
            "rewards/margin": -0.1,
            "rewards/accuracy": 1 / 3,  # a tie is no success
        }
    )

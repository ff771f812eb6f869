"""Preference pairs as training data, and the exact gradient of a loss of pairs as token weights.

A loss of a pair is a function of two numbers, s of the chosen completion and s of the rejected one
(`algorithm.pair_losses`), and s is linear in what the model says of tokens: a sum of log-probabilities, or one value.
So with c = d loss / d s, known after a forward pass of the whole minibatch, the gradient of the loss is that of

    sum over sequences of c x s,

a token sum with c in its weights. No microbatch has to hold both sequences of a pair, and no split changes the
gradient. The price is that forward pass: about a third of a step's forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.losses import masked_sum
from torchtitan_rl.types import Datum, LossInputs

__all__ = [
    "completion_logprobs",
    "last_values",
    "pair_loss",
    "pair_metrics",
    "scored_datums",
    "value_datums",
    "value_sum",
    "with_logprob_coefficients",
    "with_value_coefficients",
]

Sequences = Sequence[tuple[list[int], list[int]]]
"""(prompt tokens, completion tokens) of the sequences of pairs: the chosen one of a pair, then its rejected one."""


def scored_datums(sequences: Sequences) -> list[Datum]:
    """A datum per sequence for a policy: completion tokens have `loss_mask` 1. `group` is the index of the pair."""
    data = []
    for index, (prompt, completion) in enumerate(sequences):
        tokens = torch.tensor(prompt + completion)
        mask_T = torch.zeros(len(tokens) - 1)
        mask_T[max(0, len(prompt) - 1) :] = 1.0
        inputs = {"loss_mask": mask_T, "token_weights": torch.zeros_like(mask_T)}
        data.append(
            Datum(tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs=inputs, group=index // 2, rollout=index)
        )
    return data


def value_datums(sequences: Sequences) -> list[Datum]:
    """A datum per sequence for a model with a value head: every token is read, and the last position alone has
    `loss_mask` 1. A value depends on no target, so `target_tokens` repeat the tokens. `group` is the pair's index."""
    data = []
    for index, (prompt, completion) in enumerate(sequences):
        tokens = torch.tensor(prompt + completion)
        mask_T = torch.zeros(len(tokens))
        mask_T[-1] = 1.0
        inputs = {"loss_mask": mask_T, "token_weights": torch.zeros_like(mask_T)}
        data.append(Datum(tokens=tokens, target_tokens=tokens, loss_inputs=inputs, group=index // 2, rollout=index))
    return data


def completion_logprobs(data: list[Datum], logprobs: list[torch.Tensor], *, mean: bool = False) -> torch.Tensor:
    """Log-probability of each datum's completion, float64 (N,): the sum over its tokens of `logprobs`, each (T,), or
    with `mean` their mean."""
    sums = []
    for datum, logprobs_T in zip(data, logprobs, strict=True):
        trained_logprobs = logprobs_T[datum.loss_inputs["loss_mask"] > 0].double()
        sums.append(trained_logprobs.mean() if mean else trained_logprobs.sum())
    return torch.stack(sums)


def last_values(data: list[Datum], values: list[torch.Tensor]) -> torch.Tensor:
    """The value at the last token of each datum, float64 (N,), of `values`, each (T,)."""
    return torch.stack([values_T[-1].double() for _, values_T in zip(data, values, strict=True)])


def pair_loss(numbers_N: torch.Tensor, loss_fn: Callable) -> tuple[float, torch.Tensor]:
    """(mean of the loss over the pairs, its derivative by each number (N,)), float64. `numbers_N` are those of chosen
    and rejected completions in turn; `loss_fn` has its arguments bound."""
    numbers_N = numbers_N.detach().double().requires_grad_()
    loss = loss_fn(numbers_N[0::2], numbers_N[1::2]).mean()
    (derivative_N,) = torch.autograd.grad(loss, numbers_N)
    return loss.item(), derivative_N


def with_logprob_coefficients(
    data: list[Datum], derivative_N: torch.Tensor, *, mean: bool = False, sft_coef: float = 0.0
) -> list[Datum]:
    """The data with `token_weights` by which `losses.cross_entropy` has the gradient of the pairs' loss.

    Weights are -derivative at the tokens of a completion; with `mean` divided by their number. `sft_coef` adds
    sft_coef x the cross-entropy on chosen completions, a mean over all their tokens (the NLL term of RPO,
    arXiv:2404.19733).
    """
    masks = [datum.loss_inputs["loss_mask"] for datum in data]
    num_chosen = sum(float(mask_T.sum()) for mask_T in masks[0::2])
    weights = []
    for index, (mask_T, derivative) in enumerate(zip(masks, derivative_N.tolist(), strict=True)):
        weight = -derivative / (float(mask_T.sum()) if mean else 1.0)
        if sft_coef and index % 2 == 0:
            weight += sft_coef / num_chosen
        weights.append(mask_T * weight)
    return with_inputs(data, token_weights=weights)


def with_value_coefficients(data: list[Datum], derivative_N: torch.Tensor) -> list[Datum]:
    """The data with `token_weights` by which `value_sum` has the gradient of the pairs' loss."""
    weights = [
        datum.loss_inputs["loss_mask"] * derivative
        for datum, derivative in zip(data, derivative_N.tolist(), strict=True)
    ]
    return with_inputs(data, token_weights=weights)


def value_sum(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """sum w x predicted value."""
    return masked_sum(inputs, inputs.token_weights * inputs.predicted_values), {}


def pair_metrics(numbers_N: torch.Tensor, scale: float) -> dict[str, float]:
    """`rewards/*` of pairs: means of `scale` x the numbers of chosen and rejected completions, of their difference,
    and the share of pairs with the chosen one above. A tie is no success."""
    chosen_P, rejected_P = scale * numbers_N[0::2], scale * numbers_N[1::2]
    return {
        "rewards/chosen": chosen_P.mean().item(),
        "rewards/rejected": rejected_P.mean().item(),
        "rewards/margin": (chosen_P - rejected_P).mean().item(),
        "rewards/accuracy": (chosen_P > rejected_P).double().mean().item(),
    }

"""Changes of a minibatch before its optimizer step, by statistics of all its tokens (`algorithm.minibatch_fn`).

`(data, **minibatch_config) -> data`: all datums of the step, before a split into microbatches, with the policy's
log-probabilities just before the step as `old_logprobs`. The answer has the same datums in the same order; it may
change `token_weights` and `advantages`, or add columns. A loss cannot do this: it is a sum over tokens and sees a
microbatch. A function marked with `reads_entropy` also gets `old_entropy`, the entropy of the policy's distribution.
One marked with `reads_batch_start` gets `batch_logprobs`, the policy's log-probabilities before the batch's first step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch

from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.types import Datum

__all__ = ["clip_cov", "covariances", "kl_cov", "reads_batch_start", "reads_entropy", "top_entropy"]


def reads_entropy(function: Callable) -> Callable:
    """Marks a `minibatch_fn` whose data are to have the column `old_entropy`, in nats, from the same forward pass as
    `old_logprobs`."""
    function.reads_entropy = True  # type: ignore[attr-defined]
    return function


def reads_batch_start(function: Callable) -> Callable:
    """Marks a `minibatch_fn` whose data are to have the column `batch_logprobs`: the policy's log-probabilities before
    the first step on the batch, from one more forward pass of a batch. In that step they are `old_logprobs`."""
    function.reads_batch_start = True  # type: ignore[attr-defined]
    return function


def covariances(data: list[Datum]) -> list[torch.Tensor]:
    """(A - mean A) x (log pi - mean log pi) of each trained token, means over all trained tokens of the data; float64,
    each (T,), -inf at masked tokens. Their mean is the covariance that the policy's entropy falls by (Cui et al.,
    arXiv:2505.22617). log pi is the policy's just before the step."""
    masks = [datum.loss_inputs["loss_mask"] > 0 for datum in data]
    products = []
    for name in ("advantages", "old_logprobs"):
        rows = [datum.loss_inputs[name].double() for datum in data]
        trained = torch.cat([row_T[mask_T] for row_T, mask_T in zip(rows, masks, strict=True)])
        mean = trained.mean() if len(trained) else 0.0
        products.append([row_T - mean for row_T in rows])
    return [
        torch.where(mask_T, advantages_T * logprobs_T, -math.inf)
        for mask_T, advantages_T, logprobs_T in zip(masks, *products, strict=True)
    ]


def clip_cov(
    data: list[Datum], *, fraction: float = 2e-4, low: float = 1.0, high: float = 5.0, seed: int = 0
) -> list[Datum]:
    """Clip-Cov: a random few tokens of high covariance get the advantage 0 (Cui et al., arXiv:2505.22617).

    Of N trained tokens, those with a covariance (`covariances`) strictly between `low` and `high` are candidates;
    `fraction` x N of them, rounded down, at least one, do not train. Their weight stays in the mean, and in the KL and
    the entropy. The choice depends on `seed` and on the sequences, not on their order. The defaults are the paper's.
    Raises ValueError for a `fraction` outside (0, 1], and bounds that cross.
    """
    _check_fraction(fraction, "2e-4")
    if not low < high:
        raise ValueError(f"low={low}: is not below high={high}, so no token is between them; use 1 and 5")
    rows = covariances(data)
    covariance_N = torch.cat(rows)
    candidates = (covariance_N > low) & (covariance_N < high)
    first = torch.argsort(_random_keys(data, seed).masked_fill(~candidates, math.inf), stable=True)
    chosen_N = torch.zeros_like(candidates)
    chosen_N[first[: min(int(candidates.sum()), _share(fraction, covariance_N))]] = True
    return with_inputs(
        data,
        advantages=[
            torch.where(chosen_T, 0.0, datum.loss_inputs["advantages"])
            for chosen_T, datum in zip(chosen_N.split(list(map(len, data))), data, strict=True)
        ],
    )


@reads_batch_start
def kl_cov(data: list[Datum], *, fraction: float = 2e-4, coef: float = 1.0) -> list[Datum]:
    """KL-Cov: the tokens of highest covariance pay for their distance to the policy before the batch (Cui et al.,
    arXiv:2505.22617).

    Of N trained tokens, `fraction` x N with the highest covariance (`covariances`), rounded down, at least one, get
    A - coef x sign(log pi - log pi_batch) for A, pi_batch the policy before the batch's first step. At a ratio of 1, as
    at the step, the gradient is that of the surrogate plus coef x |log pi - log pi_batch|, the penalty of the paper's
    code. A token without such a distance pays nothing, as all tokens in the first step. `fraction` and `coef` are the
    paper's.
    Raises ValueError for a `fraction` outside (0, 1], and a `coef` that is not positive and finite.
    """
    _check_fraction(fraction, "2e-4")
    if not 0 < coef < math.inf:
        raise ValueError(f"coef={coef}: must be positive and finite, it is the factor of the penalty; use 1")
    covariance_N = torch.cat(covariances(data))
    by_key = torch.argsort(_random_keys(data, 0), stable=True)  # equal covariances: in an order that is not the data's
    highest = by_key[torch.argsort(covariance_N[by_key], descending=True, stable=True)]
    chosen_N = torch.zeros(len(covariance_N), dtype=torch.bool)
    chosen_N[highest[: _share(fraction, covariance_N)]] = True
    rows = []
    for chosen_T, datum in zip(chosen_N.split(list(map(len, data))), data, strict=True):
        inputs = datum.loss_inputs
        away_T = torch.sign(inputs["old_logprobs"] - inputs["batch_logprobs"])
        rows.append(torch.where(chosen_T, inputs["advantages"] - coef * away_T, inputs["advantages"]))
    return with_inputs(data, advantages=rows)


@reads_entropy
def top_entropy(data: list[Datum], *, fraction: float = 0.2) -> list[Datum]:
    """Only the tokens of highest entropy train: the others get the advantage 0 (Wang et al., arXiv:2506.01939).

    A trained token stays if its entropy just before the step is at least the quantile 1 - `fraction` of all trained
    tokens; at the threshold, equal ones all stay. The weights of the others stay in the mean, in the KL and in the
    entropy. The default is the paper's. Raises ValueError for a `fraction` outside (0, 1].
    """
    _check_fraction(fraction, "0.2")
    trained = torch.cat([d.loss_inputs["old_entropy"][d.loss_inputs["loss_mask"] > 0] for d in data]).sort().values
    if not len(trained):
        return data
    # A quantile between two tokens keeps the upper one, so it need not be interpolated.
    threshold = trained[math.ceil(round((1 - fraction) * (len(trained) - 1), 6))]
    rows = []
    for datum in data:
        below_T = (datum.loss_inputs["old_entropy"] < threshold) & (datum.loss_inputs["loss_mask"] > 0)
        rows.append(torch.where(below_T, 0.0, datum.loss_inputs["advantages"]))
    return with_inputs(data, advantages=rows)


def _check_fraction(fraction: float, default: str) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(
            f"fraction={fraction}: must be above 0 and at most 1, it is a part of all tokens; use {default}"
        )


def _share(fraction: float, covariance_N: torch.Tensor) -> int:
    """Tokens that a fraction of the trained ones is: at least one, where there is one."""
    trained = int((covariance_N > -math.inf).sum())
    return min(trained, max(1, int(fraction * trained)))


def _random_keys(data: list[Datum], seed: int) -> torch.Tensor:
    """A uniform number per token of the data, float64, that depends on the seed, the sequence and the position in it,
    not on the order of the data."""
    keys = []
    for datum in data:
        name = f"{int(seed)}/{datum.group}/{datum.rollout}/{datum.tokens.tolist()}"
        digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
        stream = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        keys.append(torch.rand(len(datum), generator=stream, dtype=torch.float64))
    return torch.cat(keys)

"""Losses for a service that computes log-probabilities and gradients, and knows a few losses by name.

A loss of the target log-probabilities can be sent in two ways. A loss that the service knows is sent by its name, with
this package's token weights folded into the numbers that the loss is linear in. Any other loss is evaluated here, on
log-probabilities that the service has computed. What is sent then is the cross-entropy with the weights -dloss/dlogp:
its gradient with respect to the parameters is the loss's own, by the chain rule.

Either way the loss and its metrics are computed here, from the log-probabilities that the service answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType

import torch
from torch.utils._pytree import tree_leaves

from torchtitan_rl.algorithm import losses
from torchtitan_rl.algorithm.surrogate import data_metrics, sampled_logprobs
from torchtitan_rl.dispatch.microbatches import pack
from torchtitan_rl.types import Datum, LossFunction, LossInputs

__all__ = ["EvaluatedLoss", "ServiceLoss", "evaluate", "linearized", "service_loss"]

_NOT_COMPUTED = {
    "entropy": "the entropy of the policy's distribution",
    "predicted_values": "a critic's values",
    "teacher_kl": "the KL to a teacher's whole distribution",
}
"""Loss input -> its words, for messages."""


@dataclass(kw_only=True, slots=True)
class ServiceLoss:
    """A loss in the service's words."""

    name: str
    inputs: list[dict[str, torch.Tensor]]
    """Per datum, what the service's loss reads besides the tokens: float32 (T,) or (T, K), and `target_tokens`."""
    config: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class EvaluatedLoss:
    """A loss on log-probabilities."""

    loss: float
    sums: dict[str, float]
    """Metric sums over tokens; names ending in `_max` are maxima."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """Per datum, the derivative by each log-probability, in the targets' shape; empty unless asked for."""


class _NotComputed(torch.Tensor):
    """In the place of a loss input that only the holder of the model can compute. Any use of it raises ValueError."""

    message = ""

    @classmethod
    def of(cls, name: str) -> _NotComputed:
        tensor = torch.empty(0).as_subclass(cls)
        tensor.message = (
            f"loss input {name!r}: a remote service answers log-probabilities of the targets alone, and not "
            f"{_NOT_COMPUTED[name]}; use a loss of log-probabilities, or backend='actors'"
        )
        return tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise ValueError(next(leaf.message for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)))


def evaluate(
    loss_fn: LossFunction, data: list[Datum], logprobs: list[torch.Tensor], *, weight: float | None = None
) -> EvaluatedLoss:
    """The loss of the data whose targets have these log-probabilities, one tensor per datum. With `weight`: also the
    gradients of `weight` x the loss.

    `policy/entropy` is estimated: the mean of -logp over sampled tokens, which the entropy is the expectation of where
    the policy itself sampled. Raises what the loss raises, and ValueError for a loss that reads more than
    log-probabilities.
    """
    batch, wanted = pack(data), weight is not None
    leaf = torch.cat(logprobs).detach().requires_grad_(wanted)
    inputs = LossInputs(
        policy_logprobs=leaf,
        **{name: _NotComputed.of(name) for name in _NOT_COMPUTED},
        datum=torch.repeat_interleave(torch.tensor(batch.lengths)),
        num_datums=len(data),
        tensors=batch.loss_inputs,
        turns=batch.turns,
    )
    with torch.set_grad_enabled(wanted):
        loss, metrics = loss_fn(inputs)
    sums = {name: float(value) for name, value in {**_sampled(inputs), **metrics}.items()}
    gradients: list[torch.Tensor] = []
    if weight is not None:
        gradient = torch.zeros_like(leaf)
        if loss.requires_grad:  # else no log-probability has a part in it
            derivative = torch.autograd.grad(loss * weight, leaf, allow_unused=True)[0]
            gradient = gradient if derivative is None else derivative
        gradients = list(gradient.split(batch.lengths))
    return EvaluatedLoss(loss=loss.item(), sums=sums, gradients=gradients)


def _sampled(inputs: LossInputs) -> dict[str, torch.Tensor]:
    """`algorithm.surrogate.sampled_metrics`, with the entropy estimated."""
    if "sampling_logprobs" not in inputs.tensors:
        return {}
    with torch.no_grad():
        mask_T, policy = inputs.loss_mask > 0, sampled_logprobs(inputs)
        sums = {"policy/entropy": -policy[mask_T].sum()}
        if inputs.policy_logprobs.dim() == 1:
            sums |= losses.mismatch(policy, inputs)
        return sums | data_metrics(inputs, mask_T)


def linearized(data: list[Datum], gradients: list[torch.Tensor]) -> ServiceLoss:
    """The cross-entropy that has these derivatives by the log-probabilities of the targets."""
    inputs = [
        {"target_tokens": datum.target_tokens, "weights": -gradient.float()}
        for datum, gradient in zip(data, gradients, strict=True)
    ]
    return ServiceLoss(name="cross_entropy", inputs=inputs)


def service_loss(loss_fn: LossFunction, data: list[Datum], weight: float) -> ServiceLoss | None:
    """`weight` x the loss in the service's words, if it can be said exactly; None if not."""
    function, keywords = _unwrapped(loss_fn)
    if not isinstance(function, FunctionType) or (words := _WORDS.get(function)) is None:
        return None
    terms = [words(datum, weight, **keywords) for datum in data]
    inputs = [row for row, _ in filter(None, terms)]
    if len(inputs) < len(data) or not all(torch.isfinite(x).all() for row in inputs for x in row.values()):
        return None
    return ServiceLoss(name=function.__name__, inputs=inputs, config=terms[0][1])


def _unwrapped(loss_fn: LossFunction) -> tuple[Callable, dict]:
    """The loss without bound settings, and the settings."""
    if isinstance(loss_fn, partial) and not loss_fn.args:
        return loss_fn.func, loss_fn.keywords
    return loss_fn, {}


_Words = tuple[dict[str, torch.Tensor], dict[str, float]] | None


def _cross_entropy(datum: Datum, weight: float, **settings) -> _Words:
    weights = datum.loss_inputs.get("token_weights")
    if settings or weights is None or weights.shape != datum.target_tokens.shape:
        return None
    return {"target_tokens": datum.target_tokens, "weights": weights.float() * weight}, {}


def _policy_gradient(datum: Datum, weight: float) -> dict[str, torch.Tensor] | None:
    """What the service's losses of a ratio read, with the weights in the advantages; None where they do not fit.
    Masked tokens get no advantage, so their ratio, whatever it is, has no part."""
    columns = datum.loss_inputs
    old = columns.get("old_logprobs", columns.get("sampling_logprobs"))
    weights, advantages, mask = (columns.get(name) for name in ("token_weights", "advantages", "loss_mask"))
    rows = (old, weights, advantages, mask)
    if any(x is None or x.dim() > 1 for x in rows) or datum.target_tokens.dim() > 1:
        return None
    trained = mask > 0
    return {
        "target_tokens": datum.target_tokens,
        "logprobs": torch.where(trained, old, 0.0).float(),
        "advantages": torch.where(trained, weights * weight * advantages, 0.0).float(),
    }


def _importance_sampling(datum: Datum, weight: float, **settings) -> _Words:
    rows = None if settings else _policy_gradient(datum, weight)
    return None if rows is None else (rows, {})


def _ppo(
    datum: Datum, weight: float, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = float("inf")
) -> _Words:
    rows = _policy_gradient(datum, weight)
    # A minimum keeps a factor only while the factor is not negative.
    if rows is None or dual_clip < float("inf") or bool((datum.loss_inputs["token_weights"] * weight < 0).any()):
        return None
    losses.check_clip(clip_low, clip_high, dual_clip)
    return rows, _bounds(clip_low, clip_high)


def _cispo(datum: Datum, weight: float, clip_low: float = 1.0, clip_high: float = 4.0) -> _Words:
    losses.check_clip(clip_low, clip_high)
    rows = _policy_gradient(datum, weight)
    return None if rows is None else (rows, _bounds(clip_low, clip_high))


def _bounds(clip_low: float, clip_high: float) -> dict[str, float]:
    return {"clip_low_threshold": 1 - clip_low, "clip_high_threshold": 1 + clip_high}


_WORDS: dict[Callable, Callable[..., _Words]] = {
    losses.cross_entropy: _cross_entropy,
    losses.importance_sampling: _importance_sampling,
    losses.ppo: _ppo,
    losses.cispo: _cispo,
}
"""Losses that the service knows under the function's own name. `dro`'s penalty is not linear in an advantage, and
`gspo` counts a sequence's trained tokens: both are sent as cross-entropies."""

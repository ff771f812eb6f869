"""What the public definitions say, in float64: the five losses, their derivatives, and AdamW's arithmetic.

All arrays are one-dimensional over the tokens of one datum, or of any shape where every entry is a token's. Every loss
is a sum over tokens, never a mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Loss:
    """One loss of one datum: its value (a sum over tokens) and its derivative by each token's log-probability."""

    value: float
    slope: Array


def as64(values) -> Array:
    return np.asarray(values, dtype=np.float64)


def cross_entropy(logp, weights) -> Loss:
    """-(logp * weights).sum()"""
    logp, weights = as64(logp), as64(weights)
    return Loss(-(logp * weights).sum(), -weights)


def importance_sampling(logp, logprobs, advantages) -> Loss:
    """-(exp(logp - logprobs) * advantages).sum()"""
    logp, logprobs, advantages = as64(logp), as64(logprobs), as64(advantages)
    terms = np.exp(logp - logprobs) * advantages
    return Loss(-terms.sum(), -terms)


def ppo(logp, logprobs, advantages, clip_low_threshold=0.8, clip_high_threshold=1.2) -> Loss:
    """-min(r * A, clip(r, low, high) * A).sum(), r = exp(logp - logprobs); flat where the clipped term is smaller."""
    logp, logprobs, advantages = as64(logp), as64(logprobs), as64(advantages)
    ratio = np.exp(logp - logprobs)
    free, clipped = ratio * advantages, np.clip(ratio, clip_low_threshold, clip_high_threshold) * advantages
    return Loss(-np.minimum(free, clipped).sum(), -np.where(free <= clipped, free, 0.0))


def cispo(logp, logprobs, advantages, clip_low_threshold=0.0, clip_high_threshold=4.0) -> Loss:
    """-(clip(r, low, high) * logp * A).sum(); no derivative flows through the clipped ratio."""
    logp, logprobs, advantages = as64(logp), as64(logprobs), as64(advantages)
    factor = np.clip(np.exp(logp - logprobs), clip_low_threshold, clip_high_threshold) * advantages
    return Loss(-(factor * logp).sum(), -factor)


def dro(logp, logprobs, advantages, beta=0.05) -> Loss:
    """-(logp * A - 0.5 * beta * (logp - logprobs)**2).sum()"""
    logp, logprobs, advantages = as64(logp), as64(logprobs), as64(advantages)
    gap = logp - logprobs
    return Loss(-(logp * advantages - 0.5 * beta * gap**2).sum(), -(advantages - beta * gap))


POLICY_LOSSES = {"importance_sampling": importance_sampling, "ppo": ppo, "cispo": cispo, "dro": dro}


def policy_loss(name: str, logp, logprobs, advantages, config: Mapping[str, float] | None = None) -> Loss:
    """The loss of this name with this `loss_fn_config`."""
    return POLICY_LOSSES[name](logp, logprobs, advantages, **(config or {}))


@dataclass(frozen=True)
class AdamStep:
    """The hyperparameters of one optimizer step and the factor by which its gradient is a fixed gradient g's."""

    scale: float
    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0


def one_step_like(steps: list[AdamStep]) -> AdamStep:
    """The single first step that moves the parameters exactly like these steps, of which only the last has lr > 0.

    While lr is 0 the parameters stay where they are, so every gradient is a known multiple of one gradient g. Then
    m = c g and v = d g**2 elementwise, with c and d known, and the last update is lr * c' g / (sqrt(d') |g| + eps),
    with c' and d' after bias correction. A first step from a fresh state with the gradient s g makes the update
    lr' * s g / (s |g| + eps). They are equal for s = sqrt(d') and lr' = lr * c' / s. As in torch.optim.AdamW, the
    running averages and the bias correction use the betas of the step at hand, and decay is decoupled: the parameters
    shrink by 1 - lr * weight_decay.
    """
    if any(step.lr for step in steps[:-1]):
        raise ValueError("steps: only the last may have a learning rate; the parameters have to stay where they are")
    first = second = 0.0
    for step in steps:
        first = step.beta1 * first + (1 - step.beta1) * step.scale
        second = step.beta2 * second + (1 - step.beta2) * step.scale**2
    last, count = steps[-1], len(steps)
    mean, spread = first / (1 - last.beta1**count), (second / (1 - last.beta2**count)) ** 0.5
    lr = last.lr * mean / spread
    return AdamStep(spread, lr, 0.9, 0.95, last.eps, last.lr * last.weight_decay / lr if last.weight_decay else 0.0)

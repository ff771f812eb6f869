"""Losses: functions of per-token tensors that return a token **sum** and metric sums.

`weights` says how much each token counts; a reduction filled it once for the whole batch, so a loss never
divides by anything and splitting a batch changes nothing. Metric sums are over tokens with a loss mask; a
name ending in `_max` is a maximum. Hyperparameters are keyword arguments (`algorithm.loss_config`).
"""

from __future__ import annotations

import torch

from torchtitan_rl.types import LossInputs

__all__ = ["cross_entropy", "importance_sampling", "ppo", "value_loss"]


def cross_entropy(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Supervised: -sum weights x logp. Needs `weights` only."""
    return -(inputs.weights * inputs.policy_logprobs).sum(), {}


def importance_sampling(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy gradient with the importance ratio to the old policy: -sum weights x ratio x advantage."""
    ratio_T = _ratio(inputs)
    return -(inputs.weights * ratio_T * inputs.advantages).sum(), {}


def ppo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate of Schulman et al. 2017 (arXiv:1707.06347), with separate bounds as in DAPO (arXiv:2503.14476).

    -sum weights x min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A), ratio against the old policy: the
    one that sampled, or with `recompute_logprobs_per_minibatch` the trainer's own just before the step.
    """
    ratio_T = _ratio(inputs)
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    advantages_T = inputs.advantages
    objective_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    was_clipped_T = (clipped_T * advantages_T < ratio_T * advantages_T) & (inputs.loss_mask > 0)
    return -(inputs.weights * objective_T).sum(), {"policy/clip_frac": was_clipped_T.sum()}


def value_loss(
    inputs: LossInputs, *, clip: float = float("inf"),
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A critic's half squared error against `returns`: sum weights x max of it and of that with the value held within
    `clip` of the value before the batch (the clipped value loss of the PPO authors' implementation)."""
    error_T = (inputs.predicted_values - inputs.returns).square()
    held_T = inputs.values + (inputs.predicted_values - inputs.values).clamp(-clip, clip)
    loss_T = 0.5 * torch.maximum(error_T, (held_T - inputs.returns).square())
    mask_T = inputs.loss_mask
    return (inputs.weights * loss_T).sum(), {
        "critic/squared_error": (mask_T * error_T.detach()).sum(),
        "critic/value_mean": (mask_T * inputs.predicted_values.detach()).sum()}


def _ratio(inputs: LossInputs) -> torch.Tensor:
    # Where nothing trains the difference is replaced, not multiplied, by zero: exp of garbage times 0 may be NaN.
    # Beyond a factor of e^20 the ratio is held: exp would overflow, and its gradient poison even a clipped token.
    old_T = inputs.tensors.get("old_logprobs", inputs.tensors.get("sampling_logprobs"))
    difference_T = inputs.policy_logprobs - (inputs.sampling_logprobs if old_T is None else old_T)
    return torch.where(inputs.loss_mask > 0, difference_T, 0.0).clamp(-20.0, 20.0).exp()

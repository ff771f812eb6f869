"""The terms that learning from a teacher's distributions adds to an objective."""

from __future__ import annotations

import dataclasses

import torch

from torchtitan_rl.algorithm.losses import cross_entropy, masked_difference, mismatch, reverse_kl
from torchtitan_rl.algorithm.surrogate import sampled_logprobs
from torchtitan_rl.config.algorithm import DistillConfig
from torchtitan_rl.types import LossFunction, LossInputs

__all__ = ["distilled", "zero_loss"]


def zero_loss(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss of 0 in the place of `loss_fn`, for a policy that learns from the teacher alone."""
    return inputs.policy_logprobs.new_zeros(()), {}


def distilled(
    inputs: LossInputs, *, loss_fn: LossFunction, distill: DistillConfig | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`loss_fn` on the sampled tokens, plus a cross-entropy on soft targets, plus the divergence that `distill` sets.

    Data with `soft_weights` have targets (T, 1 + K): the sampled token for `loss_fn`, and K soft targets.
    """
    soft, sums = None, {}
    if "soft_weights" in inputs.tensors:
        soft = dataclasses.replace(
            inputs,
            policy_logprobs=inputs.policy_logprobs[:, 1:],
            tensors={**inputs.tensors, "token_weights": inputs.soft_weights},
        )
        inputs = dataclasses.replace(inputs, policy_logprobs=sampled_logprobs(inputs))
        if "sampling_logprobs" in inputs.tensors:
            with torch.no_grad():
                sums = mismatch(inputs.policy_logprobs, inputs)
    loss, metrics = loss_fn(inputs)
    metrics = {**sums, **metrics}
    if "teacher_logprobs" in inputs.tensors:  # k1 of the reverse KL, on the policy's samples
        away_T = masked_difference(inputs, inputs.policy_logprobs.detach(), inputs.teacher_logprobs)
        metrics = {**metrics, "distill/kl": away_T.sum()}
    if soft is not None:
        loss, metrics = loss + cross_entropy(soft)[0], {**metrics, **_soft_metrics(soft)}
    if distill is not None and distill.divergence == "full":
        divergence, divergence_metrics = reverse_kl(inputs)
        loss, metrics = loss + distill.coef * divergence, {**metrics, **divergence_metrics}
    return loss, metrics


def _soft_metrics(soft: LossInputs) -> dict[str, torch.Tensor]:
    """Sums over tokens: KL(soft targets || policy), with each token's soft weights scaled to sum to 1; and 1 per token
    with soft targets."""
    with torch.no_grad():
        total_T1 = soft.token_weights.sum(1, keepdim=True)
        shares_TK = torch.where(total_T1 > 0, soft.token_weights / total_T1, 0.0)
        cross_TK = torch.where(shares_TK > 0, shares_TK * soft.policy_logprobs, 0.0)
        divergence = (torch.special.xlogy(shares_TK, shares_TK) - cross_TK).sum()
        return {"distill/kl": divergence, "distill/target_frac": (total_T1 > 0).sum()}

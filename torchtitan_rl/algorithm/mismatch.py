"""How far trainer and generator disagree on sampled tokens."""

from __future__ import annotations

import torch

from torchtitan_rl.types import LossInputs

__all__ = ["kl_sum", "mismatch"]


def kl_sum(logprobs_T: torch.Tensor, others_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of k3, an estimate of KL(p || q) from tokens sampled from p, in float64.

    k3 = r - 1 - log r >= 0 with r = q / p: Schulman 2020, "Approximating KL divergence". `logprobs_T` are p's,
    `others_T` q's; masked tokens count 0, even with log-probabilities that are not finite.
    """
    away_T = torch.where(mask_T, others_T - logprobs_T, 0.0).double()
    return (torch.expm1(away_T) - away_T).sum()


def mismatch(policy_T: torch.Tensor, inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Metrics over sampled tokens: the sum of KL(generator || trainer), the largest difference of log-probabilities."""
    mask_T = inputs.loss_mask > 0
    difference_T = torch.where(mask_T, policy_T - inputs.sampling_logprobs, 0.0)
    return {
        "mismatch/kl": kl_sum(inputs.sampling_logprobs, policy_T, mask_T),
        "mismatch/logprob_diff_max": difference_T.abs().max(),
    }

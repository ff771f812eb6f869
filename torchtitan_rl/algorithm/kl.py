"""Estimators of KL(policy || reference) from the sampled tokens, and the KL as a penalty on advantages.

An estimator maps d = policy_logprobs - reference_logprobs of a token that the policy sampled to one number (Schulman
2020, "Approximating KL divergence"). The means of k1 and k3 are the KL.

An unbiased value is not an unbiased gradient. As a reward an estimator k is held constant and the policy gradient is
E[k x grad log pi]. For k1 this expectation is the gradient of the KL. For k2 and k3 the expectation is another vector:
d^2 / 2 and e^-d - 1 + d grow on both sides of d = 0, so a token less likely under the policy than under the reference
is pushed down further. The config check refuses k2 and k3 as rewards.

In the loss, weighed by the ratio (`kl_ratio_weighted`), the gradient is that of E_policy[k], written as E_old[ratio x
k]: of the KL for k1 and k3, whose mean it is, and of something else for k2.
"""

from __future__ import annotations

import torch

from torchtitan_rl.algorithm.losses import LOG_RATIO_LIMIT

__all__ = ["KL_ESTIMATORS", "k1", "k2", "k3", "penalized"]


def k1(difference_T: torch.Tensor) -> torch.Tensor:
    """d: unbiased, of either sign. As a loss its gradient has mean 0; as a reward its gradient is that of the KL."""
    return _clamped(difference_T)


def k2(difference_T: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased in value; as a loss on the policy's own samples its gradient is that of the KL."""
    return 0.5 * _clamped(difference_T).square()


def k3(difference_T: torch.Tensor) -> torch.Tensor:
    """e^-d - 1 + d: unbiased in value, never negative; the loss term of GRPO (arXiv:2402.03300)."""
    d = _clamped(difference_T)
    # Near 0 the terms cancel and leave rounding error: below 0.1 use the series, exact to 1e-12.
    factor = torch.ones_like(d)
    for n in (9, 8, 7, 6, 5, 4, 3):
        factor = 1 - d / n * factor
    return torch.where(d.abs() < 0.1, 0.5 * d.square() * factor, torch.expm1(-d) + d)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def penalized(
    advantages_T: torch.Tensor, mask_T: torch.Tensor, policy_T: torch.Tensor, reference_T: torch.Tensor, *, coef: float
) -> torch.Tensor:
    """Advantages minus coef x k1, 0 where the mask is 0: the KL as a reward of the token itself, which counts for no
    earlier token and has no baseline."""
    penalty_T = coef * k1(torch.where(mask_T > 0, policy_T - reference_T, 0.0))
    return torch.where(mask_T > 0, advantages_T - penalty_T, 0.0)


def _clamped(difference_T: torch.Tensor) -> torch.Tensor:
    return difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

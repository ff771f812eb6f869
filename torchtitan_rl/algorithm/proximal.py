"""Losses that keep the policy near the old one by other means than a clipped ratio.

`algorithm.losses` has the other losses, and says what a loss is given and returns.
"""

from __future__ import annotations

import torch

from torchtitan_rl.algorithm.surrogate import log_ratio, masked_difference, masked_sum, old_logprobs, ratio
from torchtitan_rl.types import LossInputs

__all__ = ["dppo_kl", "dppo_tv", "sapo"]


def sapo(
    inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Soft adaptive policy optimisation: a sigmoid of the ratio in the place of a clip (Gao et al., arXiv:2511.20347).

    -sum w x gate(ratio) x A with gate(r) = 4 / tau x sigmoid(tau x (r - 1)), where tau is `tau_pos` for A > 0 and
    `tau_neg` otherwise. The gate has slope 1 at a ratio of 1, as the ratio itself, and less the further the ratio is
    from 1. A higher tau narrows the range of ratios that train. The defaults are the paper's.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        if not 0 < tau < float("inf"):
            raise ValueError(f"{name}={tau}: must be positive and finite, it is how fast the gate closes; use 1")
    tau_T = torch.full_like(inputs.advantages, tau_neg).masked_fill(inputs.advantages > 0, tau_pos)
    gate_T = 4 / tau_T * torch.sigmoid(tau_T * (ratio(inputs) - 1))
    return -masked_sum(inputs, inputs.token_weights * gate_T * inputs.advantages), {}


def dppo_tv(
    inputs: LossInputs, *, delta_low: float = 0.2, delta_high: float = 0.2, cap: float = float("inf"), tau: float = 0.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Divergence proximal policy optimisation with the binary total variation (Qi et al., arXiv:2602.04879).

    -sum w x M x ratio x A. M is 0 for a token with A > 0 whose probability has risen by more than `delta_high`, and for
    a token with A < 0 whose probability has fallen by more than `delta_low`; otherwise M is 1. |pi - pi_old| of the
    sampled token is the total variation of the two distributions over "this token" and "any other token".

    `cap` holds the ratio that multiplies a token's gradient, truncated importance sampling as in section 5.4 of the
    paper. `tau` adds tau x log-ratio^2 at every trained token (Kimi K2.5, arXiv:2602.02276); prime-rl's default loss is
    this function with tau = 1e-3. Metric sums: `policy/clip_frac`, tokens with M = 0.
    """
    policy_T, old_T = _trained_logprobs(inputs)
    return _masked_surrogate(inputs, (policy_T.exp() - old_T.exp()).abs(), delta_low, delta_high, cap, tau)


def dppo_kl(
    inputs: LossInputs,
    *,
    delta_low: float = 0.05,
    delta_high: float = 0.05,
    cap: float = float("inf"),
    tau: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`dppo_tv` with the binary KL(pi_old || pi) as the divergence (Qi et al., arXiv:2602.04879).

    p log(p / q) + (1 - p) log((1 - p) / (1 - q)), with p the old policy's probability of the sampled token and q the
    policy's. A token is dropped as in `dppo_tv`: only where it has moved the way that its advantage pushes it.
    """
    policy_T, old_T = _trained_logprobs(inputs)
    # Probabilities of all other tokens together.
    other_probs_T, old_other_probs_T = (-torch.expm1(x).clamp(max=0.0) for x in (policy_T, old_T))
    # xlogy is 0 where its first argument is: a token of probability 1 leaves nothing to the others.
    other_term_T = torch.xlogy(old_other_probs_T, old_other_probs_T) - torch.xlogy(old_other_probs_T, other_probs_T)
    return _masked_surrogate(inputs, old_T.exp() * (old_T - policy_T) + other_term_T, delta_low, delta_high, cap, tau)


def _trained_logprobs(inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the policy and of the old policy, without gradient, 0 at masked tokens."""
    columns = inputs.policy_logprobs.detach(), old_logprobs(inputs).detach()
    policy_T, old_T = (masked_difference(inputs, column, torch.zeros_like(column)) for column in columns)
    return policy_T, old_T


def _masked_surrogate(
    inputs: LossInputs, divergence_T: torch.Tensor, delta_low: float, delta_high: float, cap: float, tau: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The plain surrogate without the tokens that moved too far the way that their advantage pushes them."""
    for name, delta in (("delta_low", delta_low), ("delta_high", delta_high)):
        if not delta >= 0:
            raise ValueError(f"{name}={delta}: must not be negative, it is how far a probability may move; use 0.2")
    if not cap > 1:
        raise ValueError(
            f"cap={cap}: must be above 1, or it would hold the ratio of an unchanged policy; use about 20, or leave it "
            "out"
        )
    if not 0 <= tau < float("inf"):
        raise ValueError(f"tau={tau}: must be finite and not negative, it weighs a penalty; use 0 for none")
    log_ratio_T = log_ratio(inputs)
    ratio_T = log_ratio_T.exp()
    ratio_T = ratio_T * (cap / ratio_T.detach()).clamp(max=1.0)
    too_high_T = (inputs.advantages > 0) & (log_ratio_T > 0) & (divergence_T > delta_high)
    too_low_T = (inputs.advantages < 0) & (log_ratio_T < 0) & (divergence_T > delta_low)
    dropped_T = too_high_T | too_low_T
    loss = -masked_sum(inputs, inputs.token_weights * torch.where(dropped_T, 0.0, ratio_T * inputs.advantages))
    if tau:
        loss = loss + tau * masked_sum(inputs, inputs.token_weights * log_ratio_T.square())
    return loss, {"policy/clip_frac": (dropped_T & (inputs.loss_mask > 0)).sum()}

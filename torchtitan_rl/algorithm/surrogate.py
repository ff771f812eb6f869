"""The clipped surrogate of PPO, the building blocks of losses on sampled tokens, and the metrics of any such loss.

`algorithm.losses` has the other losses, and says what a loss is given and returns.
"""

from __future__ import annotations

import torch

from torchtitan_rl.types import LossInputs

__all__ = ["LOG_RATIO_LIMIT", "check_clip", "clipped_surrogate", "data_metrics", "kl_sum", "log_ratio"]
__all__ += ["masked_difference", "masked_sum", "mismatch", "old_logprobs", "ppo", "ratio"]
__all__ += ["sampled_logprobs", "sampled_metrics"]

LOG_RATIO_LIMIT = 20.0
"""Nats. Log-ratios are clamped to +-20: exp of more may overflow and poison even a clipped token's gradient."""


def ppo(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = float("inf")
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate of Schulman et al. 2017 (arXiv:1707.06347), with separate bounds as in DAPO (arXiv:2503.14476).

    -sum w x min(ratio x A, clip(ratio, 1 - clip_low, 1 + clip_high) x A). With `dual_clip` = c > 1 the objective
    of a token with A < 0 is at least c x A (Ye et al., arXiv:1912.09729).
    """
    check_clip(clip_low, clip_high, dual_clip)
    return clipped_surrogate(inputs, ratio(inputs), clip_low, clip_high, dual_clip)


def clipped_surrogate(
    inputs: LossInputs, ratio_T: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float = float("inf")
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's loss for any ratio (T,)."""
    # max(min(r A, clip(r) A), c A) for A < 0 is the plain surrogate of min(r, c).
    bounded_T = torch.where(inputs.advantages < 0, ratio_T.clamp(max=dual_clip), ratio_T)
    clipped_T = bounded_T.clamp(1 - clip_low, 1 + clip_high)
    objective_T = torch.minimum(bounded_T * inputs.advantages, clipped_T * inputs.advantages)
    was_clipped_T = (objective_T != ratio_T * inputs.advantages) & (inputs.loss_mask > 0)
    return -masked_sum(inputs, inputs.token_weights * objective_T), {"policy/clip_frac": was_clipped_T.sum()}


def ratio(inputs: LossInputs) -> torch.Tensor:
    """Policy / old policy at each trained token, 1 at masked tokens, (T,); carries gradient."""
    return log_ratio(inputs).exp()


def log_ratio(inputs: LossInputs) -> torch.Tensor:
    """Log of `ratio`, clamped to +-`LOG_RATIO_LIMIT`."""
    difference_T = masked_difference(inputs, inputs.policy_logprobs, old_logprobs(inputs))
    return difference_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def old_logprobs(inputs: LossInputs) -> torch.Tensor:
    """The old policy's log-probabilities, (T,): the trainer's where the run recomputes them, else the generator's."""
    return inputs.old_logprobs if "old_logprobs" in inputs.tensors else inputs.sampling_logprobs


def masked_difference(inputs: LossInputs, left_T: torch.Tensor, right_T: torch.Tensor) -> torch.Tensor:
    """left - right at trained tokens, exactly 0 at masked tokens, in value and in gradient.

    A masked difference is replaced by 0, not multiplied: exp of garbage times 0 may be NaN.
    Raises ValueError unless left and right are (T,): (T, K) with T = K would broadcast to every pair of tokens.
    """
    _one_per_token(inputs, left_T, right_T)
    return torch.where(inputs.loss_mask > 0, left_T - right_T, 0.0)


def masked_sum(inputs: LossInputs, terms_T: torch.Tensor) -> torch.Tensor:
    """Sum of the terms of trained tokens. Terms of masked tokens are replaced by 0, so a masked NaN reaches no sum.

    Raises ValueError unless there is one term per token.
    """
    _one_per_token(inputs, terms_T)
    return torch.where(inputs.loss_mask > 0, terms_T, 0.0).sum()


def _one_per_token(inputs: LossInputs, *columns: torch.Tensor) -> None:
    for column in columns:
        if column.shape != inputs.loss_mask.shape:
            raise ValueError(
                f"loss inputs: have shape {tuple(column.shape)} where loss_mask has {tuple(inputs.loss_mask.shape)}; "
                "give one number per token: several targets of a token, (T, K), are for cross_entropy"
            )


def check_clip(clip_low: float, clip_high: float, dual_clip: float = float("inf")) -> None:
    """Raises ValueError for bounds that cannot be met."""
    if not 1 - clip_low <= 1 + clip_high:
        raise ValueError(
            f"clip_low={clip_low}: the bounds 1 - clip_low = {1 - clip_low:g} and 1 + clip_high = "
            f"{1 + clip_high:g} cross; use distances from 1, such as 0.2 and 0.28"
        )
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise ValueError(f"{name}={value}: must not be negative, it is a distance from a ratio of 1; use 0.2")
    if not dual_clip > 1:
        raise ValueError(
            f"dual_clip={dual_clip}: must be above 1, or it would hold the ratio of an unchanged policy; "
            "use about 3, or leave it out"
        )


# Metrics of any loss.


def sampled_metrics(inputs: LossInputs, trained_N: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Metric sums of any loss on sampled data: entropy; with one target per position, how far trainer and generator
    disagree; and `data_metrics`. Empty for a critic and for data without `sampling_logprobs`. `trained_N`: indices of
    the tokens that `loss_mask` marks, which the host need not read from the device then."""
    if inputs.policy_logprobs is None or "sampling_logprobs" not in inputs.tensors:
        return {}
    trained = inputs.loss_mask > 0 if trained_N is None else trained_N
    with torch.no_grad():
        sums = {"policy/entropy": inputs.entropy[trained].sum()}
        if inputs.policy_logprobs.dim() == 1:
            sums |= mismatch(inputs.policy_logprobs, inputs)
        return sums | data_metrics(inputs, trained)


def data_metrics(inputs: LossInputs, trained: torch.Tensor) -> dict[str, torch.Tensor]:
    """Metric sums of the advantages and of the KL to the reference, where the data have them. `trained` says which
    tokens `loss_mask` marks, as a mask or as indices."""
    sums = {}
    if "advantages" in inputs.tensors:
        sums["advantage/mean"] = inputs.advantages[trained].sum()
        sums["advantage/abs_max"] = torch.where(inputs.loss_mask > 0, inputs.advantages.abs(), 0.0).max()
    if "reference_logprobs" in inputs.tensors:  # on tokens that the policy, or nearly the policy, sampled
        policy_T = sampled_logprobs(inputs)
        sums["policy/reference_kl"] = kl_sum(policy_T, inputs.reference_logprobs, inputs.loss_mask > 0)
    return sums


def sampled_logprobs(inputs: LossInputs) -> torch.Tensor:
    """The policy's log-probabilities of the sampled tokens, (T,); with soft targets the first column of (T, 1 + K)."""
    return inputs.policy_logprobs[:, 0] if "soft_weights" in inputs.tensors else inputs.policy_logprobs


def mismatch(policy_T: torch.Tensor, inputs: LossInputs) -> dict[str, torch.Tensor]:
    """Metrics over sampled tokens: the sum of KL(generator || trainer), the largest difference of log-probabilities."""
    mask_T = inputs.loss_mask > 0
    difference_T = torch.where(mask_T, policy_T - inputs.sampling_logprobs, 0.0)
    return {
        "mismatch/kl": kl_sum(inputs.sampling_logprobs, policy_T, mask_T),
        "mismatch/logprob_diff_max": difference_T.abs().max(),
    }


def kl_sum(p_logprobs_T: torch.Tensor, q_logprobs_T: torch.Tensor, mask_T: torch.Tensor) -> torch.Tensor:
    """Sum over tokens of k3, an estimate of KL(p || q) from tokens sampled from p, in float64.

    k3 = r - 1 - log r >= 0 with r = q / p: Schulman 2020, "Approximating KL divergence". `p_logprobs_T` are p's,
    `q_logprobs_T` q's. A masked token counts 0, whatever its log-probabilities are."""
    away_T = torch.where(mask_T, q_logprobs_T - p_logprobs_T, 0.0).double()
    return (torch.expm1(away_T) - away_T).sum()

"""Losses: functions of per-token tensors that return a token **sum** and metric sums.

`token_weights`, w in formulas, says how much each token counts. A reduction computes it once for the whole batch, so a
loss never divides and splitting a batch changes nothing. Metric sums are over trained tokens; a metric whose name ends
in `_max` is a maximum. Hyperparameters are keyword arguments (`algorithm.loss_config`).

The old policy of a ratio is the generator that sampled (`sampling_logprobs`), or the trainer's policy before the batch
or before the step (`old_logprobs`, with `recompute_logprobs_per_batch` or `_per_minibatch`). Log-ratios are clamped to
+-20: see docs/algorithms.md.
"""

from __future__ import annotations

import torch

from torchtitan_rl.algorithm.proximal import dppo_kl, dppo_tv, sapo
from torchtitan_rl.algorithm.surrogate import (
    LOG_RATIO_LIMIT,
    check_clip,
    clipped_surrogate,
    kl_sum,
    log_ratio,
    masked_difference,
    masked_sum,
    mismatch,
    old_logprobs,
    ppo,
    ratio,
    sampled_metrics,
)
from torchtitan_rl.types import LossInputs

__all__ = [
    "LOG_RATIO_LIMIT",
    "cispo",
    "cross_entropy",
    "datum_means",
    "datum_sums",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gspo",
    "importance_sampling",
    "kl_sum",
    "masked_difference",
    "masked_sum",
    "mismatch",
    "ppo",
    "reverse_kl",
    "sampled_metrics",
    "sapo",
    "trained_before",
    "value_loss",
    "vespo",
]


def cross_entropy(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Supervised: -sum w x logp. Needs `token_weights` only.

    Targets and weights of shape (T, K) make this top-k distillation: a weight is a teacher's probability of the target
    x the position's token weight. Raises ValueError when the shapes of log-probabilities and weights differ.
    """
    if inputs.token_weights.shape != inputs.policy_logprobs.shape:
        raise ValueError(
            f"token_weights: have shape {tuple(inputs.token_weights.shape)} where the targets' log-probabilities have "
            f"{tuple(inputs.policy_logprobs.shape)}; give every target a weight"
        )
    # A target of weight 0 is replaced, not multiplied: 0 x -inf would be NaN.
    return -torch.where(inputs.token_weights != 0, inputs.token_weights * inputs.policy_logprobs, 0.0).sum(), {}


def reverse_kl(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Distillation from a teacher's whole distribution: sum w x KL(policy || teacher), exact over the vocabulary.

    Gu et al., "MiniLLM" (arXiv:2306.08543), per token. Raises ValueError when the data lack `teacher_hidden`.
    """
    if inputs.teacher_kl is None:
        raise ValueError("teacher_kl=None: the data carry no teacher_hidden to compute it from; distil from a teacher")
    return masked_sum(inputs, inputs.token_weights * inputs.teacher_kl), {
        "distill/kl": torch.where(inputs.loss_mask > 0, inputs.teacher_kl.detach(), 0.0).sum()
    }


def importance_sampling(inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy gradient with the importance ratio to the old policy: -sum w x ratio x advantage."""
    return -masked_sum(inputs, inputs.token_weights * ratio(inputs) * inputs.advantages), {}


def gspo(
    inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's surrogate with one ratio per sequence, the geometric mean of token ratios (Zheng et al., arXiv:2507.18071).

    The form is the paper's GSPO-token (equations 14 and 15): token t has the ratio sg[s] x pi_t / sg[pi_t], with s the
    sequence's ratio and sg a stopped gradient. Every token's ratio has the value s and the gradient of the token's own
    log-probability, so advantages may differ within a sequence. Where advantages and weights are the same throughout a
    sequence, the gradient is that of the sequence's ratio.

    A sequence is a datum; its length is the number of trained tokens. With the reduction `sequence_mean` the loss is
    the paper's objective. The bounds are the paper's, narrower than PPO's because the ratio is a mean.
    """
    check_clip(clip_low, clip_high)
    log_ratio_T = masked_difference(inputs, inputs.policy_logprobs.detach(), old_logprobs(inputs))
    mean_T = datum_means(inputs, log_ratio_T)[inputs.datum]
    own_T = masked_difference(inputs, inputs.policy_logprobs, inputs.policy_logprobs.detach())
    return clipped_surrogate(inputs, _clamped_exp(mean_T + own_T), clip_low, clip_high)


def gmpo(
    inputs: LossInputs, *, log_clip_low: float = 0.4, log_clip_high: float = 0.4
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy gradient with the geometric mean of a sequence's clipped ratios (Zhao et al., arXiv:2507.20673, GMPO).

    -sum w x s x A with s = exp(mean over the sequence's trained tokens of the clipped log-ratio). Before the mean a
    log-ratio is held from above at `log_clip_high` where A > 0, else from below at -`log_clip_low`. The bounds are in
    nats, not distances from 1: the paper's 0.4 holds ratios within e^-0.4 and e^0.4.

    Token t has the ratio sg[s] x pi_t / sg[pi_t] as in `gspo`, and without gradient where its log-ratio is clipped, so
    advantages may differ within a sequence. Where advantages and weights are the same throughout a sequence, the
    gradient is that of the paper's objective. A sequence is a datum; with the reduction `sequence_mean` the loss is the
    paper's.
    """
    for name, bound in (("log_clip_low", log_clip_low), ("log_clip_high", log_clip_high)):
        if not bound >= 0:
            raise ValueError(f"{name}={bound}: must not be negative, it is a distance from a log-ratio of 0; use 0.4")
    log_ratio_T = masked_difference(inputs, inputs.policy_logprobs, old_logprobs(inputs))
    clipped_T = torch.where(
        inputs.advantages > 0, log_ratio_T.clamp(max=log_clip_high), log_ratio_T.clamp(min=-log_clip_low)
    )
    mean_T = datum_means(inputs, clipped_T.detach())[inputs.datum]
    ratio_T = _clamped_exp(mean_T + (clipped_T - clipped_T.detach()))
    was_clipped_T = (clipped_T != log_ratio_T) & (inputs.loss_mask > 0)
    loss = -masked_sum(inputs, inputs.token_weights * ratio_T * inputs.advantages)
    return loss, {"policy/clip_frac": was_clipped_T.sum()}


def vespo(
    inputs: LossInputs, *, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy gradient with a smooth function of the sequence's whole ratio as a constant factor (Shen et al.,
    arXiv:2602.10693, VESPO).

    -sum w x stop_gradient(phi(W)) x A x logp with W the product of the ratios of the datum's trained tokens and phi(W)
    = W^k x exp(lambda x (1 - W)): 1 at W = 1, and near 0 for sequences that the policy says far less or far more often
    than the old policy. `k_pos` and `lambda_pos` are for tokens with A >= 0, the others for A < 0. The product is not
    normalised by the length. Its logarithm is held within +-20, phi's at most at 20. The defaults are those of the
    authors' code (github.com/FloyedShen/VESPO) and of TRL.
    """
    for name, value in (("k_pos", k_pos), ("k_neg", k_neg)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value}: must be finite and not negative, it is the power of a ratio; use 2")
    for name, value in (("lambda_pos", lambda_pos), ("lambda_neg", lambda_neg)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}={value}: must be positive and finite, it is what bounds the factor; use 3")
    log_weight_B = datum_sums(inputs, log_ratio(inputs).detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_weight_T, negative_T = log_weight_B[inputs.datum], inputs.advantages < 0
    k_T = torch.full_like(log_weight_T, k_pos).masked_fill(negative_T, k_neg)
    lambda_T = torch.full_like(log_weight_T, lambda_pos).masked_fill(negative_T, lambda_neg)
    factor_T = (k_T * log_weight_T - lambda_T * torch.expm1(log_weight_T)).clamp(max=LOG_RATIO_LIMIT).exp()
    return -masked_sum(inputs, inputs.token_weights * factor_T * inputs.advantages * _trained_logprobs(inputs)), {}


def cispo(
    inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy gradient with a clipped ratio as a constant factor (CISPO, MiniMax-M1, arXiv:2506.13585).

    -sum w x stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) x A x logp: a clipped token still trains.
    `clip_low=1` is no lower bound, as in the paper: "we did not impose a lower bound on the IS weight [...] we only
    tuned" the upper one. The paper does not print its upper bound. `clip_high=4` bounds ratios at 5, as SkyRL does by
    default and TRL recommends after ScaleRL (arXiv:2510.13786): a bound on outliers, not PPO's trust region.
    """
    check_clip(clip_low, clip_high)
    ratio_T = ratio(inputs).detach()
    factor_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss = -masked_sum(inputs, inputs.token_weights * factor_T * inputs.advantages * _trained_logprobs(inputs))
    return loss, {"policy/clip_frac": ((factor_T != ratio_T) & (inputs.loss_mask > 0)).sum()}


def dro(inputs: LossInputs, *, beta: float = 0.05) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Policy gradient with a quadratic penalty on the log-ratio: -sum w x (A x logp - beta / 2 x log-ratio^2).

    Direct reward optimisation, Richemond et al. (arXiv:2405.19107), per token, with advantages in place of values.
    """
    if not 0 < beta < float("inf"):
        raise ValueError(f"beta={beta}: must be positive, it is what keeps the policy near the old one; use 0.05")
    square_T = log_ratio(inputs).square()
    terms_T = inputs.token_weights * (inputs.advantages * _trained_logprobs(inputs) - 0.5 * beta * square_T)
    return -masked_sum(inputs, terms_T), {}


def value_loss(inputs: LossInputs, *, clip: float = float("inf")) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A critic's loss: sum w x max of two half squared errors against `returns`, of the predicted value and of
    the prediction clamped to within `clip` of the value before the batch (the clipped value loss of the PPO authors'
    implementation)."""
    if not clip > 0:
        raise ValueError(f"clip={clip}: must be positive, or no value could move; leave it out for no clipping")
    error_T = masked_difference(inputs, inputs.predicted_values, inputs.returns).square()
    clipped_value_T = inputs.values + masked_difference(inputs, inputs.predicted_values, inputs.values).clamp(
        -clip, clip
    )
    loss_T = 0.5 * torch.maximum(error_T, masked_difference(inputs, clipped_value_T, inputs.returns).square())
    return masked_sum(inputs, inputs.token_weights * loss_T), {
        "critic/squared_error": error_T.detach().sum(),
        "critic/value_mean": masked_sum(inputs, inputs.predicted_values.detach()),
    }


# Building blocks, also for losses of your own; `algorithm.surrogate` has more.


def datum_sums(inputs: LossInputs, values_T: torch.Tensor) -> torch.Tensor:
    """Sum over each datum's tokens, (num_datums,). A datum is never split over microbatches, so the sum is complete."""
    return values_T.new_zeros(inputs.num_datums).index_add(0, inputs.datum, values_T)


def datum_means(inputs: LossInputs, values_T: torch.Tensor) -> torch.Tensor:
    """Mean over each datum's trained tokens of values that are 0 at masked tokens, (num_datums,); 0 without any."""
    lengths_B = datum_sums(inputs, (inputs.loss_mask > 0).to(values_T.dtype)).clamp(min=1.0)
    return datum_sums(inputs, values_T) / lengths_B


def trained_before(inputs: LossInputs) -> torch.Tensor:
    """How many trained tokens of its datum stand before each token, int64 (T,).

    In a rollout of one turn whose tokens all train, that is the position in the completion, counted from 0.
    """
    mask_T = (inputs.loss_mask > 0).long()
    before_T = mask_T.cumsum(0) - mask_T
    per_datum = mask_T.new_zeros(inputs.num_datums).index_add(0, inputs.datum, mask_T)
    return before_T - (per_datum.cumsum(0) - per_datum)[inputs.datum]


def _clamped_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _trained_logprobs(inputs: LossInputs) -> torch.Tensor:
    return torch.where(inputs.loss_mask > 0, inputs.policy_logprobs, 0.0)

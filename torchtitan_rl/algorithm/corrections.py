"""Off-policy corrections: factors of token weights, for tokens that a generator sampled with other log-probabilities
than the trainer's.

The importance weight is rho = trainer / generator = exp(old_logprobs - sampling_logprobs); the trainer computed
`old_logprobs` before the step. A correction (`algorithm.correction_fn`, see objective.py) is a function
`(LossInputs, **correction_config) -> (factor_T, metric sums)`. The factor is a constant for the gradient and multiplies
the token's weight, so a correction combines with every loss.

Truncated factors are min(rho, cap) (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"; Espeholt et al., arXiv:1802.01561). Masked factors are rho within [low, high] and 0 outside (IcePop, Ling
Team, arXiv:2510.18855; per sequence Liu et al. 2025, "When speed kills stability"). Per sequence, rho is the product
over the datum's trained tokens, and every token of the datum has the same factor.
"""

from __future__ import annotations

import torch

from torchtitan_rl.algorithm.losses import LOG_RATIO_LIMIT, datum_sums, masked_difference
from torchtitan_rl.types import LossInputs

__all__ = ["masked_sequence", "masked_token", "truncated_sequence", "truncated_token"]


def truncated_token(inputs: LossInputs, *, cap: float = 2.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The factor of token t is min(rho_t, cap)."""
    return _truncated(inputs, _token_log_weights(inputs), cap)


def truncated_sequence(inputs: LossInputs, *, cap: float = 2.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The factor of a datum's tokens is min(prod rho_t, cap)."""
    return _truncated(inputs, _sequence_log_weights(inputs), cap)


def masked_token(
    inputs: LossInputs, *, low: float = 0.5, high: float = 5.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The factor of token t is rho_t within [low, high] and 0 outside: a token with factor 0 does not train."""
    return _masked(inputs, _token_log_weights(inputs), low, high)


def masked_sequence(
    inputs: LossInputs, *, low: float = 0.0, high: float = 2.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The factor of a datum's tokens is prod rho_t within [low, high] and 0 outside: such a datum does not train.

    verl's `rollout_rs="seq_sum_k1"` with `rollout_is="sequence"` (verl/trainer/ppo/rollout_corr_helper.py) differs in
    three ways. verl bounds 1 / rho, generator over trainer: `low` is 1 / verl's upper bound, `high` 1 / verl's lower.
    verl truncates the kept weights too, at `rollout_is_threshold`. verl leaves rejected tokens out of the mean's
    denominator, as `algorithm.correction_denominator="kept"` does here.
    """
    return _masked(inputs, _sequence_log_weights(inputs), low, high)


def _token_log_weights(inputs: LossInputs) -> torch.Tensor:
    return masked_difference(inputs, inputs.old_logprobs, inputs.sampling_logprobs)


def _sequence_log_weights(inputs: LossInputs) -> torch.Tensor:
    return datum_sums(inputs, _token_log_weights(inputs))[inputs.datum]


def _truncated(inputs: LossInputs, log_weights_T: torch.Tensor, cap: float):
    if not 0 < cap < float("inf"):
        raise ValueError(f"cap={cap}: must be positive and finite, it is the largest weight; use 2")
    weights_T = _weights(log_weights_T)
    return _with_metrics(inputs, weights_T.clamp(max=cap), changed_T=weights_T > cap)


def _masked(inputs: LossInputs, log_weights_T: torch.Tensor, low: float, high: float):
    if not 0 <= low < high:
        raise ValueError(f"low={low}: the bounds {low:g} and {high:g} of a weight cross or are negative; use 0.5 and 5")
    if not (low <= 1 <= high):
        raise ValueError(
            f"low={low}: a weight of 1, where trainer and generator agree, is outside [{low:g}, {high:g}] "
            "and nothing would train; use bounds on either side of 1"
        )
    weights_T = _weights(log_weights_T)
    outside_T = (weights_T < low) | (weights_T > high)
    return _with_metrics(inputs, torch.where(outside_T, 0.0, weights_T), changed_T=outside_T)


def _weights(log_weights_T: torch.Tensor) -> torch.Tensor:
    return log_weights_T.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _with_metrics(inputs: LossInputs, factor_T: torch.Tensor, changed_T: torch.Tensor):
    trained_T = inputs.loss_mask > 0
    return factor_T, {
        "correction/weight_mean": factor_T[trained_T].sum(),
        "correction/changed_frac": (changed_T & trained_T).sum(),
    }

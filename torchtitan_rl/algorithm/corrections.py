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

`reject_*` and `opsm` have factors 1 and 0: they leave out tokens or whole sequences and weigh nothing (rejection
sampling in verl, masks in SkyRL). `both` multiplies two corrections, such as a truncated weight and a rejection.
docs/off_policy.md says which is for what.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torchtitan_rl.algorithm.losses import LOG_RATIO_LIMIT, datum_means, datum_sums, masked_difference
from torchtitan_rl.types import LossInputs

__all__ = ["both", "masked_sequence", "masked_token", "opsm", "reject_geometric", "reject_outlier"]
__all__ += ["reject_sequence", "reject_token", "truncated_sequence", "truncated_token"]


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


def reject_token(
    inputs: LossInputs, *, low: float = 0.5, high: float = 5.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The factor of token t is 1 where rho_t is within [low, high] and 0 outside: `masked_token` without the weight."""
    return _rejected(inputs, _outside(_token_log_weights(inputs), low, high))


def reject_sequence(
    inputs: LossInputs, *, low: float = 0.5, high: float = 2.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The factor of a datum's tokens is 1 where prod rho_t is within [low, high] and 0 outside.

    A product grows with the length: a long sequence of small differences is rejected. The bounds are SkyRL's
    (`sequence_mask_metric="product"`).
    """
    return _rejected(inputs, _outside(_sequence_log_weights(inputs), low, high))


def reject_geometric(
    inputs: LossInputs, *, low: float = 0.99, high: float = 1.01
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The factor of a datum's tokens is 1 where the geometric mean of rho_t is within [low, high] and 0 outside.

    The mean does not depend on the length. The bounds are SkyRL's (`sequence_mask_metric="geometric"`); verl's
    `rollout_rs="seq_mean_k1"` bounds the reciprocal. Liu et al. 2025, "When speed kills stability".
    """
    return _rejected(inputs, _outside(datum_means(inputs, _token_log_weights(inputs))[inputs.datum], low, high))


def reject_outlier(
    inputs: LossInputs, *, low: float = 1e-4, high: float = 100.0
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The factor of a datum's tokens is 0 where rho_t of any of its trained tokens is outside [low, high], else 1.

    One token that the trainer finds impossible rejects its sequence (a veto). The bounds are those that SkyRL suggests
    for `outlier_token_is_threshold_low` and `_high`; verl's `rollout_rs="seq_max_k2"` with threshold u is the bounds
    exp(-sqrt(2 u)) and exp(sqrt(2 u)).
    """
    outside_T = _outside(_token_log_weights(inputs), low, high) & (inputs.loss_mask > 0)
    return _rejected(inputs, datum_sums(inputs, outside_T.to(inputs.loss_mask.dtype))[inputs.datum] > 0)


def opsm(inputs: LossInputs, *, delta: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, equation 9).

    The factor of a token with A < 0 is 0 where the mean over its datum's trained tokens of log generator - log policy
    is above `delta`, in nats; all other factors are 1. A sequence that the policy no longer says is not pushed down
    further. The policy is the one that is trained, now, so this needs no recomputed log-probabilities; its mask changes
    from step to step, so it cannot have `correction_denominator="kept"`.

    `delta` has no default: slime's is 1e-4, and TRL gives 0.5 as an example.
    """
    if not 0 <= delta < float("inf"):
        raise ValueError(f"delta={delta}: must be finite and not negative, it is a mean log-ratio in nats; use 0.1")
    away_T = masked_difference(inputs, inputs.sampling_logprobs, inputs.policy_logprobs.detach())
    far_T = datum_means(inputs, away_T)[inputs.datum] > delta
    return _rejected(inputs, far_T & (inputs.advantages < 0))


def both(inputs: LossInputs, *, first: Callable, second: Callable) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The product of two corrections' factors: `partial(both, first=truncated_token, second=reject_geometric)`.

    Either may be a partial with arguments, or another `both`. `correction/changed_frac` counts tokens with factor 0.
    """
    (one_T, metrics), (other_T, other_metrics) = first(inputs), second(inputs)
    factor_T = one_T * other_T
    return factor_T, {**metrics, **other_metrics, **_with_metrics(inputs, factor_T, changed_T=factor_T == 0)[1]}


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
    outside_T = _outside(log_weights_T, low, high)
    return _with_metrics(inputs, torch.where(outside_T, 0.0, _weights(log_weights_T)), changed_T=outside_T)


def _rejected(inputs: LossInputs, outside_T: torch.Tensor):
    return _with_metrics(inputs, (~outside_T).to(inputs.loss_mask.dtype), changed_T=outside_T)


def _outside(log_weights_T: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Where a weight is outside [low, high], bool (T,)."""
    if not 0 <= low < high:
        raise ValueError(f"low={low}: the bounds {low:g} and {high:g} of a weight cross or are negative; use 0.5 and 5")
    if not (low <= 1 <= high):
        raise ValueError(
            f"low={low}: a weight of 1, where trainer and generator agree, is outside [{low:g}, {high:g}] "
            "and nothing would train; use bounds on either side of 1"
        )
    weights_T = _weights(log_weights_T)
    return (weights_T < low) | (weights_T > high)


def _weights(log_weights_T: torch.Tensor) -> torch.Tensor:
    return log_weights_T.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _with_metrics(inputs: LossInputs, factor_T: torch.Tensor, changed_T: torch.Tensor):
    trained_T = inputs.loss_mask > 0
    return factor_T, {
        "correction/weight_mean": factor_T[trained_T].sum(),
        "correction/changed_frac": (changed_T & trained_T).sum(),
    }

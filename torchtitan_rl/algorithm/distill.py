"""Learning from a teacher's distributions: its say on each sampled token as an advantage, or a divergence as a loss.

The teacher is another model (`roles.teacher`), or the policy itself under a prompt that knows more
(workflows/self_distill.py, which uses `token_advantages`). On the policy's own samples the advantage
-(log pi - log q) is the gradient of the reverse KL(pi, q) (Agarwal et al., "On-Policy Distillation of Language
Models", arXiv:2306.13649).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from torchtitan_rl.algorithm.losses import LOG_RATIO_LIMIT
from torchtitan_rl.config.algorithm import DistillConfig
from torchtitan_rl.types import Datum, ForwardBackwardOutput

__all__ = ["token_advantages", "teacher_request", "with_teacher", "with_distillation", "without_distillation"]


def token_advantages(
    student: Sequence[float], teacher: Sequence[float], *, coef: float, discount: float = 0.0
) -> list[float]:
    """A_t = -coef x sum over s >= t of discount^(s - t) x (student_s - teacher_s): of one rollout's sampled tokens.

    Differences are held within +-`LOG_RATIO_LIMIT`; a token whose student log-probability is not finite, which does not
    train, counts 0. Raises ValueError when the two differ in length or the teacher says NaN.
    """
    if len(student) != len(teacher):
        raise ValueError(f"teacher: scored {len(teacher)} tokens of {len(student)} that were sampled; score each once")
    advantages, later = [], 0.0
    for mine, theirs in zip(reversed(student), reversed(teacher)):
        if math.isnan(theirs):
            raise ValueError("teacher: gave a log-probability NaN; its weights or numerics are broken")
        difference = max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, mine - theirs)) if math.isfinite(mine) else 0.0
        later = difference + discount * later
        advantages.append(-coef * later)
    return advantages[::-1]


def teacher_request(config: DistillConfig | None) -> dict[str, Any]:
    """Arguments of the teacher's `forward`."""
    if config is None or config.divergence == "tokens":
        return {}
    return {"top_k": config.top_k} if config.divergence == "top_k" else {"hidden": True}


def with_teacher(data: list[Datum], output: ForwardBackwardOutput, config: DistillConfig) -> list[Datum]:
    """Datums that carry what the configured divergence needs of the teacher's forward on them.

    Advantages from it have their mean over the batch's trained tokens taken off.
    """
    if config.divergence == "full":
        return [
            dataclasses.replace(datum, teacher_hidden=hidden) for datum, hidden in zip(data, output.hidden, strict=True)
        ]
    if config.divergence == "top_k":
        return [
            dataclasses.replace(datum, soft_targets=(tokens, config.coef * logprobs.exp()))
            for datum, tokens, logprobs in zip(data, output.top_tokens, output.top_logprobs, strict=True)
        ]
    earned = [_earned(datum, config) for datum in data]
    # A baseline: far from the teacher all are negative, and pushing down what was sampled raises what was not.
    baseline = sum(map(math.fsum, earned)) / max(1, sum(map(len, earned)))
    return [
        _with_advantages(datum, [own - baseline for own in numbers], config.rewards)
        for datum, numbers in zip(data, earned, strict=True)
    ]


def with_distillation(data: list[Datum]) -> list[Datum]:
    """Datums with `soft_targets` or `teacher_hidden` as the trainer reads them; the others are the same ones.

    Soft targets become targets (T, 1 + K), the sampled token first, and `soft_weights` (T, K), 0 in datums that have
    none.
    """
    widths = {datum.soft_targets[0].shape[1] for datum in data if datum.soft_targets is not None}
    if widths:
        data = [_softened(datum, max(widths)) for datum in data]
    return [
        datum
        if datum.teacher_hidden is None
        else dataclasses.replace(_with_inputs(datum, teacher_hidden=datum.teacher_hidden), teacher_hidden=None)
        for datum in data
    ]


def without_distillation(data: list[Datum]) -> list[Datum]:
    """The same data for a role that does not learn from a teacher."""
    return [dataclasses.replace(datum, soft_targets=None, teacher_hidden=None) for datum in data]


def _softened(datum: Datum, width: int) -> Datum:
    tokens_TK = datum.tokens.new_zeros((len(datum), width))
    weights_TK = torch.zeros((len(datum), width))
    if datum.soft_targets is not None:
        tokens, shares = datum.soft_targets
        tokens_TK[:, : tokens.shape[1]] = tokens
        weights_TK[:, : tokens.shape[1]] = datum.loss_inputs["weights"][:, None] * shares
    return dataclasses.replace(
        _with_inputs(datum, soft_weights=weights_TK),
        soft_targets=None,
        target_tokens=torch.cat([datum.target_tokens[:, None], tokens_TK], 1),
    )


def _earned(datum: Datum, config: DistillConfig) -> list[float]:
    """What each trained token earns by the teacher's word; `teacher_logprobs` is there already."""
    trained = datum.loss_inputs["loss_mask"] > 0
    student, teacher = (datum.loss_inputs[name][trained].tolist() for name in ("sampling_logprobs", "teacher_logprobs"))
    return token_advantages(student, teacher, coef=config.coef, discount=config.discount)


def _with_advantages(datum: Datum, of_trained: list[float], add: bool) -> Datum:
    advantages_T = datum.loss_inputs["advantages"].clone() if add else torch.zeros(len(datum))
    advantages_T[datum.loss_inputs["loss_mask"] > 0] += torch.tensor(of_trained)
    return _with_inputs(datum, advantages=advantages_T)


def _with_inputs(datum: Datum, **inputs: torch.Tensor) -> Datum:
    return dataclasses.replace(datum, loss_inputs={**datum.loss_inputs, **inputs})

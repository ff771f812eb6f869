"""Learning from a teacher's distributions: the log-ratio of a sampled token as an advantage, or a divergence as a loss.

The teacher q is another model (`roles.teacher`). In self-distillation q is the policy itself under a prompt that says
more; rollout/self_distill.py uses `token_advantages` too. On samples of the policy pi, a policy gradient with the
advantage -(log pi - log q) is the gradient of -KL(pi || q), the reverse KL (Agarwal et al., "On-Policy Distillation of
Language Models", arXiv:2306.13649).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.losses import LOG_RATIO_LIMIT
from torchtitan_rl.algorithm.returns import episodes_of
from torchtitan_rl.algorithm.soft_targets import with_soft_columns
from torchtitan_rl.config.algorithm import DistillConfig
from torchtitan_rl.types import Datum, ForwardBackwardOutput

__all__ = ["token_advantages", "teacher_request", "with_teacher"]


def token_advantages(
    student: Sequence[float], teacher: Sequence[float], *, coef: float, discount: float = 0.0
) -> list[float]:
    """A_t = -coef x sum over s >= t of discount^(s - t) x (student_s - teacher_s), over a rollout's sampled tokens.

    `student` and `teacher` are log-probabilities. Differences are clamped to +-`LOG_RATIO_LIMIT`. A token whose student
    log-probability is not finite does not train; its difference counts 0.
    Raises ValueError when the lengths differ or a teacher log-probability is NaN.
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
    """Arguments of the teacher's `forward` that the configured divergence needs."""
    if config is None or config.divergence == "tokens":
        return {}
    return {"top_k": config.top_k} if config.divergence == "top_k" else {"hidden": True}


def with_teacher(data: list[Datum], output: ForwardBackwardOutput, config: DistillConfig) -> list[Datum]:
    """Datums with loss inputs from the teacher's forward: `teacher_hidden` ("full"), soft targets ("top_k") or
    advantages ("tokens"), minus their mean over the batch's trained tokens.
    """
    if config.divergence == "full":
        return with_inputs(data, teacher_hidden=output.hidden)
    if config.divergence == "top_k":
        shares = [config.coef * logprobs.exp() for logprobs in output.top_logprobs]
        return with_soft_columns(data, list(zip(output.top_tokens, shares, strict=True)))
    teacher_advantages: list[list[float]] = [[]] * len(data)
    for members in episodes_of(data):
        episode = [data[i] for i in members]
        for i, numbers in zip(members, _teacher_advantages(episode, config), strict=True):
            teacher_advantages[i] = numbers
    # A baseline. Far from the teacher every advantage is negative: lowering sampled tokens would raise all others.
    baseline = sum(map(math.fsum, teacher_advantages)) / max(1, sum(map(len, teacher_advantages)))
    advantages = [
        _advantages(datum, [own - baseline for own in numbers], config.rewards)
        for datum, numbers in zip(data, teacher_advantages, strict=True)
    ]
    return with_inputs(data, advantages=advantages)


def _teacher_advantages(episode: list[Datum], config: DistillConfig) -> list[list[float]]:
    """Of each of a rollout's datums the advantages of its trained tokens, from their `sampling_logprobs` and
    `teacher_logprobs`."""
    masks = [datum.loss_inputs["loss_mask"] > 0 for datum in episode]
    student, teacher = (
        torch.cat([datum.loss_inputs[name][mask] for datum, mask in zip(episode, masks, strict=True)]).tolist()
        for name in ("sampling_logprobs", "teacher_logprobs")
    )
    advantages = iter(token_advantages(student, teacher, coef=config.coef, discount=config.discount))
    return [list(islice(advantages, int(mask.sum()))) for mask in masks]


def _advantages(datum: Datum, trained_advantages: list[float], add: bool) -> torch.Tensor:
    advantages_T = datum.loss_inputs["advantages"].clone() if add else torch.zeros(len(datum))
    advantages_T[datum.loss_inputs["loss_mask"] > 0] += torch.tensor(trained_advantages)
    return advantages_T

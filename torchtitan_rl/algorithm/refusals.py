"""What judged rollouts, advantages and arguments of losses are refused for, in words. Each function raises."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torchtitan_rl.types import Rollout, RolloutGroup, Turn, is_float32

__all__ = ["refuse_advantages", "refuse_clip", "refuse_number", "refuse_reward", "refuse_shape", "refuse_turn"]


def refuse_reward(rollout: Rollout) -> NoReturn:
    """For a reward that is missing or not finite."""
    raise ValueError(
        f"reward={rollout.reward}: of rollout {rollout.id} is not a finite number; "
        "judge every rollout, or group them with algorithm.grouping.form_groups"
    )


def refuse_turn(rollout: Rollout, turn: Turn) -> NoReturn:
    """Raises ValueError for a turn whose parts do not fit, and RuntimeError for a log-probability NaN.

    A token of log-probability -inf is masked. Masking NaN too would hide a broken generator.
    """
    logprobs = turn.completion.logprobs
    if len(logprobs) != len(turn.completion.tokens):
        raise ValueError(
            f"completion.logprobs: {len(logprobs)} for {len(turn.completion.tokens)} sampled tokens in a turn of "
            f"rollout {rollout.id}; give one log-probability per token"
        )
    if turn.completion.filtered:
        raise ValueError(
            f"rollout={rollout.id}: was sampled with {turn.completion.filtered}; its log-probabilities are not those "
            "of the policy, sample training rollouts without"
        )
    raise RuntimeError(
        f"rollout={rollout.id}: token {[math.isnan(x) for x in logprobs].index(True)} was sampled with "
        "log-probability NaN; the generator's weights or numerics are broken, look at optim/grad_norm before it"
    )


def refuse_number(given: list, groups: list[RolloutGroup], advantage_fn: Callable) -> NoReturn:
    """For another number of results of an estimator than there are groups."""
    raise ValueError(
        f"{_called(advantage_fn)}: gave {len(given)} tensors for {len(groups)} groups; return one per group, in order"
    )


def refuse_advantages(given: Any, group: RolloutGroup, advantage_fn: Callable) -> NoReturn:
    """For anything but one advantage per rollout that is finite in float32."""
    numbers = given.tolist() if isinstance(given, torch.Tensor) else given
    finite = isinstance(given, torch.Tensor) and bool(torch.isfinite(given).all())
    too_large = finite and any(not is_float32(number) for number in given.flatten().tolist())
    raise ValueError(
        f"{_called(advantage_fn)}: gave {numbers} for rewards {group.rewards} of group {group.id}; return one finite "
        f"number per rollout, as a tensor or a list{'; these overflow float32' if too_large else ''}"
    )


def _called(advantage_fn: Callable) -> str:
    return f"algorithm.advantage_fn={getattr(advantage_fn, '__name__', repr(advantage_fn))}"


def refuse_shape(shape: torch.Size, of_mask: torch.Size) -> NoReturn:
    """For loss inputs or terms that are not one number per token."""
    raise ValueError(
        f"loss inputs: have shape {tuple(shape)} where loss_mask has {tuple(of_mask)}; "
        "give one number per token: several targets of a token, (T, K), are for cross_entropy"
    )


def refuse_clip(clip_low: float, clip_high: float, dual_clip: float) -> NoReturn:
    """For bounds of a ratio that cannot be met."""
    if not 1 - clip_low <= 1 + clip_high:
        raise ValueError(
            f"clip_low={clip_low}: the bounds 1 - clip_low = {1 - clip_low:g} and 1 + clip_high = "
            f"{1 + clip_high:g} cross; use distances from 1, such as 0.2 and 0.28"
        )
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise ValueError(f"{name}={value}: must not be negative, it is a distance from a ratio of 1; use 0.2")
    raise ValueError(
        f"dual_clip={dual_clip}: must be above 1, or it would hold the ratio of an unchanged policy; "
        "use about 3, or leave it out"
    )

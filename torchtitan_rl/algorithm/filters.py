"""What of a batch is worth training on: zero-variance groups, overlong completions, and how long to look for more."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from torchtitan_rl.algorithm.advantages import all_equal
from torchtitan_rl.algorithm.precomputed import Verdict, scan

if TYPE_CHECKING:
    from torchtitan_rl.config.algorithm import AlgorithmConfig
    from torchtitan_rl.types import Rollout, RolloutGroup

__all__ = ["filtered", "overlong_penalty"]


def filtered(
    groups: list[RolloutGroup], config: AlgorithmConfig, *, max_tokens: int, counts: Counter | None = None
) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
    """(groups to train on, groups left out), in order, by `config.filters`; lowers rewards and masks rollouts in place.

    A group with dropped rollouts is replaced by one of the others, and those are left out as a group of the same id.
    First completions that are too long, then rewards that are all equal, as they are then; groups with precomputed
    advantages need no variance. `max_tokens` is the limit of one completion. `counts` is given `filter/...` metrics.
    """
    filters, kept, left_out = config.filters, [], []
    counts = Counter() if counts is None else counts
    for group in groups:
        overlong = [rollout for rollout in group.rollouts if _cut_off(rollout)]
        if filters.overlong != "keep":
            counts["filter/overlong_rollouts"] += len(overlong)
        if filters.overlong == "penalty":
            for rollout in group.rollouts:
                # Cut off by the room that was left, a completion is overlong at any length.
                length = max_tokens if _cut_off(rollout) else _longest(rollout)
                penalty = overlong_penalty(length, max_tokens, filters.overlong_buffer, filters.overlong_penalty)
                rollout.reward -= penalty
                counts["filter/overlong_penalty_sum"] += penalty  # type: ignore[assignment]  # rewards, no count
        elif filters.overlong == "mask":
            for rollout in overlong:
                rollout.masked = True
        elif filters.overlong == "drop" and overlong:
            left_out.append(dataclasses.replace(group, rollouts=overlong))
            group = dataclasses.replace(group, rollouts=[r for r in group.rollouts if not _cut_off(r)])
            if not group.rollouts:
                counts["filter/overlong_groups"] += 1
                continue
        if all(rollout.masked for rollout in group.rollouts):
            counts["filter/overlong_groups"] += 1
            left_out.append(group)
        elif filters.zero_variance and all_equal(group.rewards) and not _weighs_itself(group, config):
            counts["filter/zero_variance_groups"] += 1
            left_out.append(group)
        else:
            kept.append(group)
    if filters.zero_variance:
        counts["filter/zero_variance_groups"] += 0  # in every line, or a reader cannot tell none from off
    return kept, left_out


def overlong_penalty(length: int, max_tokens: int, buffer: int, penalty: float) -> float:
    """What a completion of `length` tokens loses: 0 up to `max_tokens - buffer`, then linearly up to `penalty`.

    Soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), with the sign turned. A buffer of 0 is a step.
    """
    over = length - (max_tokens - buffer)
    if over < 0:
        return 0.0
    return penalty * min(1.0, over / buffer) if buffer else penalty


def _cut_off(rollout: Rollout) -> bool:
    """Whether a limit on tokens, of one completion or of the whole rollout, ended it."""
    return rollout.end_reason == "tokens" or any(turn.completion.truncated for turn in rollout.turns)


def _longest(rollout: Rollout) -> int:
    return max(len(turn.completion.tokens) for turn in rollout.turns)


def _weighs_itself(group: RolloutGroup, config: AlgorithmConfig) -> bool:
    if config.precomputed_advantages == "ignore":
        return False
    return scan(group).verdict is Verdict.ALL

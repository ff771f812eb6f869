"""Filters: which groups of a batch train, by the variance of their rewards and by overlong rollouts."""

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

    The overlong filter runs first. `drop` splits a group: complete rollouts stay, overlong ones are left out as a group
    of the same id. The zero-variance filter then sees the remaining rewards, less penalties; groups that are weighed by
    precomputed advantages always pass it. `max_tokens` is the limit of one completion. `counts` receives `filter/...`
    metrics.
    """
    filters, kept, left_out = config.filters, [], []
    counts = Counter() if counts is None else counts
    for group in groups:
        overlong = [rollout for rollout in group.rollouts if _cut_off(rollout)]
        if filters.overlong != "keep":
            counts["filter/overlong_rollouts"] += len(overlong)
        if filters.overlong == "penalty":
            for rollout in group.rollouts:
                # A rollout without room for more tokens is overlong, however short its completions.
                length = max_tokens if _cut_off(rollout) else _longest(rollout)
                penalty = overlong_penalty(length, max_tokens, filters.overlong_buffer, filters.overlong_penalty)
                rollout.reward -= penalty
                counts["filter/overlong_penalty_sum"] += penalty  # type: ignore[assignment]  # rewards, no count
        elif filters.overlong == "mask":
            for rollout in overlong:
                rollout.masked = True
        elif filters.overlong == "drop" and overlong:
            left_out.append(dataclasses.replace(group, rollouts=overlong, left_out="overlong"))
            group = dataclasses.replace(group, rollouts=[r for r in group.rollouts if not _cut_off(r)])
            if not group.rollouts:
                counts["filter/overlong_groups"] += 1
                continue
        if filters.overlong == "mask" and all(rollout.masked for rollout in group.rollouts):
            counts["filter/overlong_groups"] += 1
            left_out.append(dataclasses.replace(group, left_out="overlong"))
        elif filters.zero_variance and all_equal(group.rewards) and not _needs_no_variance(group, config):
            counts["filter/zero_variance_groups"] += 1
            left_out.append(dataclasses.replace(group, left_out="zero_variance"))
        else:
            kept.append(group)
    if filters.zero_variance:
        counts["filter/zero_variance_groups"] += 0  # a 0 in the metrics tells "none" from "off"
    return kept, left_out


def overlong_penalty(length: int, max_tokens: int, buffer: int, penalty: float) -> float:
    """The reward that a completion of `length` tokens loses: 0 up to `max_tokens - buffer`, then linearly to `penalty`.

    Soft overlong punishment of DAPO (arXiv:2503.14476, equation 13), with the sign turned. With a buffer of 0 a
    completion of `max_tokens` loses `penalty`, any shorter one nothing.
    """
    over = length - (max_tokens - buffer)
    if over < 0:
        return 0.0
    return penalty * min(1.0, over / buffer) if buffer else penalty


def _cut_off(rollout: Rollout) -> bool:
    """Whether a token limit, of one completion or of the whole rollout, ended the rollout."""
    return rollout.end_reason == "tokens" or any(turn.completion.truncated for turn in rollout.turns)


def _longest(rollout: Rollout) -> int:
    return max(len(turn.completion.tokens) for turn in rollout.turns)


def _needs_no_variance(group: RolloutGroup, config: AlgorithmConfig) -> bool:
    """Whether a group's own advantages weigh it. Where the config requires them, a group that lacks some passes too:
    `precomputed_advantages` refuses it, and to leave it out would hide that."""
    if config.precomputed_advantages == "require":
        return True
    return config.precomputed_advantages == "auto" and scan(group).verdict is Verdict.ALL

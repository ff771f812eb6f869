"""The age of what a batch trains on, in publications of weights."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter

from torchtitan_rl.types import RolloutGroup

__all__ = ["ages", "check_lag", "age_metrics", "mean"]


def ages(publications: list[int]) -> dict[int, int]:
    """Version -> the number of publications since its last one, for the published versions, oldest first."""
    return {version: len(publications) - 1 - i for i, version in enumerate(publications)}


def age_metrics(groups: list[RolloutGroup], publications: list[int]) -> dict[str, float]:
    """`policy/lag_mean` and `policy/lag_max` over the sampled tokens of the groups that are about to train, at any lag.

    A token's lag is the number of publications since the last one of the version that sampled the token. `publications`
    lists the published versions, oldest first; a version appears again when every step of a batch was skipped. Of a
    version that is not listed, as one that a run has sampled from before it was resumed, the listed publications after
    it count. Returns {} for groups without a token.
    """
    num_tokens = Counter[int]()
    for turn in (turn for group in groups for rollout in group.rollouts for turn in rollout.turns):
        num_tokens.update(turn.completion.policy_versions)
    if not num_tokens:
        return {}
    lags = {version: len(publications) - bisect_right(publications, version) for version in num_tokens}
    total, number = sum(lags[version] * num for version, num in num_tokens.items()), num_tokens.total()
    return {"policy/lag_mean": mean(total, number), "policy/lag_max": max(lags.values())}


def mean(total: int, number: int) -> float:
    """`statistics.mean` of whole numbers, by their sum: a whole number where it is one."""
    return total / number if total % number else total // number


def check_lag(groups: list[RolloutGroup], publications: list[int], max_lag: int) -> None:
    """Raises RuntimeError for a token older than `max_lag` publications, which admission rules out: the rollout was not
    played by this run's admission. A version that is not listed is infinitely old."""
    age = ages(publications)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        versions = {version for turn in rollout.turns for version in turn.completion.policy_versions}
        oldest = max((age.get(version, math.inf) for version in versions), default=0)
        if oldest > max_lag:
            raise RuntimeError(
                f"rollout={rollout.id!r}: has a token that is {oldest} publications old, "
                f"algorithm.max_policy_lag={max_lag}; keep no rollouts back in a workflow or hook of your own"
            )

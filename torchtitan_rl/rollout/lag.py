"""The age of what a batch trains on, in publications of weights."""

from __future__ import annotations

import math
from statistics import mean

from torchtitan_rl.types import RolloutGroup

__all__ = ["ages", "check_lag"]


def ages(publications: list[int]) -> dict[int, int]:
    """Version -> the number of publications since its last one, for the published versions, oldest first."""
    return {version: len(publications) - 1 - i for i, version in enumerate(publications)}


def check_lag(groups: list[RolloutGroup], publications: list[int], max_lag: int) -> dict[str, float]:
    """`policy/lag_mean` and `policy/lag_max` over the sampled tokens of a batch that is about to train.

    A token's lag is the number of publications since the last one of the version that sampled the token. `publications`
    lists the published versions, oldest first; a version appears again when every step of a batch was skipped. Raises
    RuntimeError for a token older than `max_lag`, which admission rules out: the rollout was not played by this run's
    admission. A version that is not listed is infinitely old.
    """
    age, lags = ages(publications), []
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        versions = [version for turn in rollout.turns for version in turn.completion.policy_versions]
        of_rollout = [age.get(version, math.inf) for version in versions]
        if of_rollout and max(of_rollout) > max_lag:
            raise RuntimeError(
                f"rollout={rollout.id!r}: has a token that is {max(of_rollout)} publications old, "
                f"algorithm.max_policy_lag={max_lag}; keep no rollouts back in a workflow or hook of your own"
            )
        lags += of_rollout
    return {"policy/lag_mean": mean(lags), "policy/lag_max": max(lags)} if lags else {}

"""Metrics of rollouts that have rewards in parts, several roles, or turns of an environment."""

from __future__ import annotations

from statistics import mean

from torchtitan_rl.tasks.reward_parts import part_means
from torchtitan_rl.types import Rollout

__all__ = ["of_features"]


def of_features(rollouts: list[Rollout]) -> dict[str, float]:
    """Means of the reward by its parts and by role, of turns, and of the share of episodes that a limit ended."""
    line, by_role = part_means(rollouts, "reward/part_{}_mean"), {}
    for rollout in rollouts:
        by_role.setdefault(rollout.role, []).append(rollout.reward)
    if len(by_role) > 1:
        line |= {f"reward/{role}_mean": mean(of_role) for role, of_role in by_role.items()}
    played = [rollout for rollout in rollouts if rollout.end_reason]
    if played:
        line["rollout/turns_mean"] = mean(len(rollout.turns) for rollout in played)
        line["rollout/limit_frac"] = mean(rollout.end_reason != "done" for rollout in played)
        for name in sorted({name for rollout in played for name in rollout.counts}):
            line[f"rollout/{name}_mean"] = mean(rollout.counts.get(name, 0.0) for rollout in played)
    return line

"""Groups: the rollouts whose rewards are compared with each other, and the reward of each rollout."""

from __future__ import annotations

import logging
import math
from collections import Counter
from numbers import Real

from torchtitan_rl.algorithm.grouping_hook import hooked_groups
from torchtitan_rl.algorithm.precomputed import drop_stale
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import A_REWARD, Rollout, RolloutGroup, is_reward

__all__ = ["form_groups", "by_task_and_role", "fill_rewards", "set_baselines"]

logger = logging.getLogger(__name__)


def form_groups(
    rollouts: list[Rollout], config: AlgorithmConfig, counts: Counter | None = None, *, policy_version: int = 0
) -> list[RolloutGroup]:
    """The groups of a batch, by `config.trajectory_grouping_hook` or by task and role, every reward filled in. Rollouts
    without turns are in no group.

    Advantages and soft targets that turns carry are removed if they were computed for a version before
    `policy_version`, the oldest one that may have sampled the rollouts.

    `counts` receives the number of rollouts without turns (`filter/skipped_rollouts`) and of rollouts that the hook
    left out (`filter/ungrouped_rollouts`). Raises ValueError when the hook returns anything but groups of the rollouts
    that it received, and for a reward that is missing or not finite.
    """
    counts = Counter() if counts is None else counts
    played = [rollout for rollout in rollouts if rollout.turns]
    if len(played) < len(rollouts):
        _count_skipped(rollouts, counts)
    hook = config.trajectory_grouping_hook
    groups = by_task_and_role(played) if hook is None else hooked_groups(played, config, counts)
    for group in groups:
        fill_rewards(group)
    turns = (turn for group in groups for rollout in group.rollouts for turn in rollout.turns)
    if any(turn.advantages is not None or turn.soft_targets is not None for turn in turns):
        drop_stale([rollout for group in groups for rollout in group.rollouts], policy_version)
    return groups


def _count_skipped(rollouts: list[Rollout], counts: Counter) -> None:
    skipped = [rollout.id for rollout in rollouts if not rollout.turns]
    counts["filter/skipped_rollouts"] += len(skipped)
    logger.warning(
        "%d of %d rollouts have no turns and are skipped; the first is %s", len(skipped), len(rollouts), skipped[0]
    )


def by_task_and_role(rollouts: list[Rollout]) -> list[RolloutGroup]:
    """One group per draw and role (per task and role where rollouts name no draw), in the order of first rollouts.

    A task that was drawn twice in a batch makes two groups.
    """
    groups: dict[tuple[str, str], RolloutGroup] = {}
    for rollout in rollouts:
        key = rollout.group or rollout.task.id, rollout.role
        if key not in groups:
            name = rollout.group or rollout.id.rsplit("/", 1)[0]
            groups[key] = RolloutGroup(id=name if rollout.role == "policy" else f"{name}/{rollout.role}", rollouts=[])
        groups[key].rollouts.append(rollout)
    return list(groups.values())


def fill_rewards(group: RolloutGroup) -> None:
    """Sets the reward of every rollout: if every rollout has a reward, that one, else the reward of its last turn.

    One rule for the whole group, because the reward of a whole attempt and that of a last turn do not compare. In a
    group without any reward whose turns all carry advantages, every reward becomes 0.
    Raises ValueError when a rollout has neither reward, or a reward is none (`types.is_reward`).
    """
    if None in group.rewards:
        _fill_from_turns(group)
    for rollout in group.rollouts:
        if is_reward(rollout.reward):
            rollout.reward = float(rollout.reward)
            continue
        if not isinstance(rollout.reward, Real):
            raise ValueError(
                f"reward={rollout.reward!r}: of rollout {rollout.id} is a {type(rollout.reward).__name__}; give every "
                f"rollout {A_REWARD}"
            )
        large = math.isfinite(rollout.reward)
        wrong, needed = ("is too large", A_REWARD) if large else ("is not finite", "a finite reward")
        raise ValueError(f"reward={rollout.reward}: of rollout {rollout.id} {wrong}; give every rollout {needed}")


def set_baselines(group: RolloutGroup, greedy: RolloutGroup) -> None:
    """Sets the baseline of every rollout of a draw: the reward of the first greedy rollout of its role, filled in as
    `fill_rewards` does. Raises ValueError as `fill_rewards` does."""
    rewards: dict[str, float | None] = {}
    for role_group in by_task_and_role([rollout for rollout in greedy.rollouts if rollout.turns]):
        fill_rewards(role_group)
        rewards[role_group.rollouts[0].role] = role_group.rollouts[0].reward
    for rollout in group.rollouts:
        rollout.baseline = rewards.get(rollout.role)


def _fill_from_turns(group: RolloutGroup) -> None:
    """Sets the reward of every rollout to the reward of its last turn, or to 0 where the workflow gave advantages and
    nobody a reward. Raises ValueError for a last turn without a reward."""
    own = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    turns = [turn for rollout in group.rollouts for turn in rollout.turns]
    if not own and all(turn.reward is None and turn.advantages is not None for turn in turns):
        for rollout in group.rollouts:  # no judge: the workflow gave its own advantages
            rollout.reward = 0.0
        return
    if own:
        logger.warning(
            "group %s: %d of %d rollouts have a reward; all take what their last turn earned",
            group.id,
            len(own),
            len(group.rollouts),
        )
    for rollout in group.rollouts:
        rollout.reward = rollout.turns[-1].reward if rollout.turns else None
        if rollout.reward is None:
            raise ValueError(
                f"rollout={rollout.id}: its last turn has no reward, and {len(own)} of {len(group.rollouts)} "
                f"rollouts of group {group.id} have one of their own; give every rollout a reward, or every last turn"
            )

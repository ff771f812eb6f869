"""Rewards of rollouts from the rewards of their turns."""

from __future__ import annotations

import logging

from torchtitan_rl.types import RolloutGroup

__all__ = ["fill_from_turns"]

logger = logging.getLogger(__name__)


def fill_from_turns(group: RolloutGroup) -> None:
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

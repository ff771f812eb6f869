"""Which rollouts are compared with each other, and what each of them earned."""

from __future__ import annotations

import logging
import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_rl.config.algorithm import AlgorithmConfig
    from torchtitan_rl.types import Rollout, RolloutGroup

__all__ = ["form_groups", "by_task_and_role", "fill_rewards"]

logger = logging.getLogger(__name__)


def form_groups(rollouts: list[Rollout], config: AlgorithmConfig, counts: Counter | None = None) -> list[RolloutGroup]:
    """The groups of a batch, by `config.trajectory_grouping_hook` or by task and role, every reward filled in.

    Rollouts without turns have nothing to train on and take no part. `counts` is given how many those were
    (`filter/skipped_rollouts`) and how many rollouts the hook left out (`filter/ungrouped_rollouts`).
    Raises ValueError when the hook returns anything but groups of what it was given, and for a reward that is missing
    or not finite.
    """
    counts = Counter() if counts is None else counts
    played = [rollout for rollout in rollouts if rollout.turns]
    if skipped := [rollout.id for rollout in rollouts if not rollout.turns]:
        counts["filter/skipped_rollouts"] += len(skipped)
        logger.warning(
            "%d of %d rollouts have no turns and are skipped; the first is %s", len(skipped), len(rollouts), skipped[0]
        )
    if config.trajectory_grouping_hook is None:
        groups = by_task_and_role(played)
    else:
        groups = config.trajectory_grouping_hook(list(played), config)
        left_out = _check_hook(groups, played, _name(config.trajectory_grouping_hook))
        if left_out:
            counts["filter/ungrouped_rollouts"] += len(left_out)
            logger.warning(
                "algorithm.trajectory_grouping_hook=%s: left out %d of %d rollouts, at least in part; the first is %s",
                _name(config.trajectory_grouping_hook),
                len(left_out),
                len(played),
                left_out[0],
            )
    for group in groups:
        fill_rewards(group)
    return groups


def by_task_and_role(rollouts: list[Rollout]) -> list[RolloutGroup]:
    """One group per task and role, in the order of their first rollouts; named after the first rollout's id."""
    from torchtitan_rl.types import RolloutGroup

    groups: dict[tuple[str, str], RolloutGroup] = {}
    for rollout in rollouts:
        key = rollout.task.id, rollout.role
        if key not in groups:
            name = rollout.id.rsplit("/", 1)[0]
            groups[key] = RolloutGroup(id=name if rollout.role == "policy" else f"{name}/{rollout.role}", rollouts=[])
        groups[key].rollouts.append(rollout)
    return list(groups.values())


def fill_rewards(group: RolloutGroup) -> None:
    """Sets the reward of every rollout: their own if all have one, else what the last turn of each earned.

    All or none, because a reward of the whole attempt and one of its last turn are not to be compared. A group without
    any reward whose turns all carry advantages gets 0.
    Raises ValueError when a reward is missing from both or not finite.
    """
    own = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
    turns = [turn for rollout in group.rollouts for turn in rollout.turns]
    if not own and all(turn.reward is None and turn.advantages is not None for turn in turns):
        for rollout in group.rollouts:  # nobody judged them: the workflow weighed their tokens itself
            rollout.reward = 0.0
        return
    if len(own) < len(group.rollouts):
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
                    f"rollouts of group {group.id} have one of their own; give every rollout a reward, or every last "
                    "turn"
                )
    for rollout in group.rollouts:
        if not math.isfinite(rollout.reward):
            raise ValueError(
                f"reward={rollout.reward}: of rollout {rollout.id} is not finite; give every rollout a finite reward"
            )


def _check_hook(groups: object, rollouts: list[Rollout], hook: str) -> list[str]:
    """Raises ValueError unless what the hook returned is made of what it was given, the objects themselves.

    A rollout of its own is accepted when every turn of it is a given one: that is how a hook compares single turns.
    Returns the ids of the rollouts that are in no group, or of which turns are in none.
    """
    from torchtitan_rl.types import RolloutGroup

    where = f"algorithm.trajectory_grouping_hook={hook}"
    if not isinstance(groups, list) or not all(isinstance(group, RolloutGroup) for group in groups):
        what = type(groups).__name__
        if isinstance(groups, list):
            what += " of " + ", ".join(sorted({type(group).__name__ for group in groups}))
        raise ValueError(f"{where}: returned a {what}; return a list of RolloutGroup")
    given = {id(rollout) for rollout in rollouts}
    ids = {rollout.id for rollout in rollouts}
    owner = {id(turn): rollout for rollout in rollouts for turn in rollout.turns}
    placed: dict[int, str] = {}
    for position, group in enumerate(groups):
        if not group.rollouts:
            raise ValueError(f"{where}: group {position} ({group.id!r}) is empty; leave empty groups out")
        for rollout in group.rollouts:
            foreign = sum(id(turn) not in owner for turn in rollout.turns)
            if id(rollout) not in given and rollout.id in ids:
                raise ValueError(
                    f"{where}: group {group.id!r} holds a copy of rollout {rollout.id}; return the rollout itself (its "
                    "reward may be set), or give a part of it an id of its own"
                )
            if foreign or not rollout.turns:
                raise ValueError(
                    f"{where}: group {group.id!r} holds rollout {rollout.id}, of which {foreign} of "
                    f"{len(rollout.turns)} turns were not given to it (a copied turn is another turn); build groups of "
                    "the turns it is given"
                )
            for turn in rollout.turns:
                if id(turn) in placed:
                    raise ValueError(
                        f"{where}: a turn of rollout {owner[id(turn)].id} is in group {placed[id(turn)]!r} and again "
                        f"in group {group.id!r}; it would train twice, put it in one"
                    )
                placed[id(turn)] = group.id
    return [rollout.id for rollout in rollouts if any(id(turn) not in placed for turn in rollout.turns)]


def _name(function: object) -> str:
    return getattr(function, "__name__", repr(function))

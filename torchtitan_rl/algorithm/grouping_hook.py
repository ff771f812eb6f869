"""Groups by the user's grouping hook, with a check that the hook built them of the rollouts that it received."""

from __future__ import annotations

import logging
from collections import Counter

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Rollout, RolloutGroup

__all__ = ["hooked_groups"]

logger = logging.getLogger(__name__)


def hooked_groups(rollouts: list[Rollout], config: AlgorithmConfig, counts: Counter) -> list[RolloutGroup]:
    """The groups that `config.trajectory_grouping_hook` returns. Counts and logs the rollouts that the hook left out.

    Raises ValueError for what `_check_hook` refuses.
    """
    hook = config.trajectory_grouping_hook
    groups = hook(list(rollouts), config)
    left_out = _check_hook(groups, rollouts, _name(hook))
    if left_out:
        counts["filter/ungrouped_rollouts"] += len(left_out)
        logger.warning(
            "algorithm.trajectory_grouping_hook=%s: left out %d of %d rollouts, at least in part; the first is %s",
            _name(hook),
            len(left_out),
            len(rollouts),
            left_out[0],
        )
    return groups


def _check_hook(groups: object, rollouts: list[Rollout], hook: str) -> list[str]:
    """Raises ValueError unless the groups hold rollouts and turns from `rollouts`, the same objects, each turn once.

    A hook may make a new rollout of turns from `rollouts`: so a hook compares single turns.
    Returns the ids of rollouts with a turn in no group.
    """
    where = f"algorithm.trajectory_grouping_hook={hook}"
    if not isinstance(groups, list) or not all(isinstance(group, RolloutGroup) for group in groups):
        returned_type = type(groups).__name__
        if isinstance(groups, list):
            returned_type += " of " + ", ".join(sorted({type(group).__name__ for group in groups}))
        raise ValueError(f"{where}: returned a {returned_type}; return a list of RolloutGroup")
    object_ids = {id(rollout) for rollout in rollouts}
    ids = {rollout.id for rollout in rollouts}
    owner = {id(turn): rollout for rollout in rollouts for turn in rollout.turns}
    placed: dict[int, str] = {}
    for position, group in enumerate(groups):
        for each in (group, *group.rollouts):
            if not isinstance(each.id, str):
                raise ValueError(
                    f"{where}: a {type(each).__name__} has the id {each.id!r}, which is no text; give a str"
                )
        if not group.rollouts:
            raise ValueError(f"{where}: group {position} ({group.id!r}) is empty; leave empty groups out")
        for rollout in group.rollouts:
            foreign = sum(id(turn) not in owner for turn in rollout.turns)
            if id(rollout) not in object_ids and rollout.id in ids:
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

"""Groups by a function of the user's, checked: they are made of the rollouts that the function was given."""

from __future__ import annotations

import logging
from collections import Counter

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Rollout, RolloutGroup

__all__ = ["hooked_groups"]

logger = logging.getLogger(__name__)


def hooked_groups(rollouts: list[Rollout], config: AlgorithmConfig, counts: Counter) -> list[RolloutGroup]:
    """What `config.trajectory_grouping_hook` makes of the rollouts; counts and names those that it left out."""
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
    """Raises ValueError unless what the hook returned is made of what it was given, the objects themselves.

    A rollout of its own is accepted when every turn of it is a given one: that is how a hook compares single turns.
    Returns the ids of the rollouts that are in no group, or of which turns are in none.
    """
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

"""Credit: which turns of a rollout learn from its advantage, and how much, where the rollout is a tree of turns.

A credit function takes a rollout and returns one number per turn: the factor of the rollout's advantage for the turn's
tokens. A turn with credit 0 does not train. `types.branches` says which turn goes on from which.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchtitan_rl.config.resolve import named
from torchtitan_rl.types.branches import last_branch as path_to_last

if TYPE_CHECKING:
    from torchtitan_rl.config.algorithm import AlgorithmConfig
    from torchtitan_rl.types import Rollout

__all__ = ["all_branches", "credits_of", "last_branch"]


def all_branches(rollout: Rollout) -> list[float]:
    """1 for every turn."""
    return [1.0] * len(rollout.turns)


def last_branch(rollout: Rollout) -> list[float]:
    """1 for the turn that was asked for last and for the turns that it goes on from, 0 for any other."""
    path = set(path_to_last(rollout.turns)) if rollout.turns else set()
    return [float(index in path) for index in range(len(rollout.turns))]


def credits_of(rollout: Rollout, config: AlgorithmConfig) -> list[float]:
    """The credits of a rollout's turns by `config.credit_fn`; 1 for each without one. Raises ValueError for anything
    but one finite number per turn."""
    if config.credit_fn is None:
        return all_branches(rollout)
    credits = config.credit_fn(rollout)
    numbers = list(credits) if isinstance(credits, (list, tuple)) else []
    if len(numbers) != len(rollout.turns) or not all(_is_number(credit) for credit in numbers):
        raise ValueError(
            f"algorithm.credit_fn={named(config.credit_fn)}: returned {repr(credits)[:80]} for the "
            f"{len(rollout.turns)} turns of rollout {rollout.id}; return a list of one finite number per turn"
        )
    return [float(credit) for credit in numbers]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)

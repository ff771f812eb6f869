"""Bounds of the numbers that a user's functions and agents give: rewards, and advantages."""

from __future__ import annotations

import numbers
from typing import Any

__all__ = ["A_REWARD", "MAX_REWARD", "is_float32", "is_reward"]

MAX_REWARD = 1e6
"""The largest size of a reward and of a part of a reward. Sums and squares of rewards of a batch then stay far below
the largest float32, which is what a datum holds."""

A_REWARD = f"a finite number between {-MAX_REWARD:g} and {MAX_REWARD:g}"
"""What a reward has to be, as error messages say it."""

_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def is_reward(value: Any) -> bool:
    """Whether a value is a number, finite, and at most `MAX_REWARD` in size. Every reward and every part of a reward
    is asked here where it enters: from a reward function or a judge, an environment, a workflow, an agent."""
    if not isinstance(value, numbers.Real):
        return False
    size: Any = abs(value)  # a whole number may be too large for a float
    return bool(size <= MAX_REWARD)  # NaN is in no order


def is_float32(number: float) -> bool:
    """Whether a number is finite as a float32, which is what a datum holds."""
    return abs(number) <= _MAX_FLOAT32

"""Errors about reward functions: whose fault, and what to mend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torchtitan_rl.record.user_code import defined_at, described, raised_at
from torchtitan_rl.tasks.reward_process import RewardProcessError
from torchtitan_rl.types import MAX_REWARD, Task, is_reward

__all__ = ["complaint", "failed", "late", "name_of", "placed"]


def complaint(value: Any, read: list[float | None], num_completions: int, task: Task) -> str:
    """The end of an error message about the answer of a reward function: what is wrong, what to return. `read` has the
    numbers of the answer, None for what is no number."""
    wanted = f"return a list of {num_completions} finite numbers, one per completion"
    if not isinstance(value, (list, tuple)):
        returned = "None" if value is None else f"{type(value).__name__} {_short(value)}"
        return f"returned {returned} for task {task.id!r}; {wanted}"
    if len(value) != num_completions:
        counts = f"{len(value)} rewards for the {num_completions} completions"
        return f"returned {counts} of task {task.id!r}; {wanted}"
    position, number = next((i, number) for i, number in enumerate(read) if not is_reward(number))
    reward = value[position]
    returned = f"{type(reward).__name__} {_short(reward)}" if number is None else str(number)
    if number is not None and math.isfinite(number):
        wanted += f", each between {-MAX_REWARD:g} and {MAX_REWARD:g}"
    return f"returned {returned} at position {position} for task {task.id!r}; {wanted}"


def late(task: Task, timeout_s: float) -> str:
    """What a deadline ended, as it continues the function's name."""
    return f"gave no answer for task {task.id!r} within {timeout_s:g} s; make it faster or allow it more time"


def _said(error: BaseException) -> str:
    """What happened, as it continues the function's name."""
    if isinstance(error, RewardProcessError):
        return str(error)
    return f"raised {described(error)}"


def failed(error: BaseException, task: Task) -> str:
    """What an exception ended, as it continues the function's name, with the line that raised the exception."""
    return f"{_said(error)} for task {task.id!r}; mend the reward function{raised_at(error)}"


def _short(value: Any) -> str:
    """The value's repr as one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def name_of(function: Callable) -> str:
    """`reward=module:qualname` of a function, a method or a callable object."""
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"reward={function.__module__}:{function.__qualname__}"


def placed(function: Callable) -> str:
    """`name_of` a function, and the file and line of a function of the user's."""
    return f"{name_of(function)}{defined_at(function)}"

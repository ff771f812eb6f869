"""Judging completions: calls a reward function with a deadline, and accepts nothing but one finite number each."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from torchtitan_rl.tasks.complaints import complaint, name_of, said
from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.tasks.outcomes import outcome, outcome_in_thread, until
from torchtitan_rl.tasks.reward_process import outcome_in_process
from torchtitan_rl.types import Task

__all__ = ["judge", "reward_function"]

Reward = Callable[[Task, list[str]], Sequence[float] | Awaitable[Sequence[float]]]


async def judge(reward: TaskFamily | Reward, task: Task, completions: list[str], timeout_s: float) -> list[float]:
    """Rewards of sibling completions: calls `reward` (or the family's), enforces the deadline, checks the answer.

    A plain function runs in a daemon thread, which blocks neither the event loop nor the process's end if it never
    returns. A function marked `reward_process.cpu_bound` runs in a process of a pool; the deadline kills that process.
    An async function runs on this event loop. Reward functions of several groups run concurrently.
    Raises RuntimeError, in one line that names function and task, when the reward function raises, gives no answer
    within `timeout_s`, or gives anything but one finite number per completion.
    """
    function, deadline = reward_function(reward, task), time.monotonic() + timeout_s
    bare = _without_partials(function)
    try:
        if getattr(bare, "cpu_bound", False):
            value, error = await outcome_in_process(function, (task, list(completions)), timeout_s)
        elif inspect.iscoroutinefunction(function):
            value, error = await until(outcome(function, task, list(completions)), deadline)
        else:
            value, error = await until(outcome_in_thread(function, task, list(completions)), deadline)
            if inspect.isawaitable(value):  # such as a partial or an object whose __call__ is async
                value, error = await until(outcome(lambda: value), deadline)
    except TimeoutError:
        late = f"gave no answer for task {task.id!r} within {timeout_s:g} s; make it faster or allow it more time"
        raise RuntimeError(f"{name_of(bare)}: {late}") from None
    if error is not None:
        raise RuntimeError(f"{name_of(bare)}: {said(error)} for task {task.id!r}; mend the reward function") from error
    if hasattr(value, "tolist"):  # a numpy array or a tensor
        value = value.tolist()
    rewards = [_number(reward) for reward in value] if isinstance(value, (list, tuple)) else []
    if len(rewards) != len(completions) or any(number is None or not math.isfinite(number) for number in rewards):
        raise RuntimeError(f"{name_of(bare)}: {complaint(value, rewards, len(completions), task)}")
    return rewards


def reward_function(reward: TaskFamily | Reward, task: Task) -> Reward:
    """The function that judges a task: `reward` itself, or the family's `reward_for(task)` or `reward`."""
    if hasattr(reward, "reward_for"):
        return reward.reward_for(task)
    return reward if callable(reward) else reward.reward


def _without_partials(function: Callable) -> Callable:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _number(value: Any) -> float | None:
    """One reward as a float; None for a value that is not a number."""
    if getattr(value, "ndim", None) == 0:  # a numpy scalar or a tensor of one number
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf

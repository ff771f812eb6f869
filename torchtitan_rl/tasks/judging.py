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
from torchtitan_rl.tasks.reward_parts import read_parts
from torchtitan_rl.tasks.reward_process import outcome_in_process
from torchtitan_rl.types import Task

__all__ = ["judge", "reward_function"]

Parts = dict[str, list[float]]
Answer = Sequence[float] | tuple[Sequence[float], dict[str, Sequence[float]]]
Reward = Callable[[Task, list[str]], Answer | Awaitable[Answer]]


async def judge(
    reward: TaskFamily | Reward, task: Task, completions: list[str], timeout_s: float, parts: Parts | None = None
) -> list[float]:
    """Rewards of sibling completions: calls `reward` (or the family's), enforces the deadline, checks the answer.

    `parts` receives the numbers by name of an answer `(rewards, parts)`. A reward with a method `judged`, such as
    `rewards.Rewards`, judges by it, and may have deadlines of its own.
    A plain function runs in a daemon thread, which blocks neither the event loop nor the process's end if it never
    returns. A function marked `reward_process.cpu_bound` runs in a process of a pool; the deadline kills that process.
    An async function runs on this event loop. Reward functions of several groups run concurrently.
    Raises RuntimeError, in one line that names function and task, when the reward function raises, gives no answer
    within `timeout_s`, or gives anything but one finite number per completion.
    """
    function, deadline = reward_function(reward, task), time.monotonic() + timeout_s
    if hasattr(function, "judged"):
        return await function.judged(task, completions, timeout_s, parts)
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
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):  # (rewards, parts)
        return read_parts(value, parts, functools.partial(_checked, task=task, num=len(completions)), name_of(bare))
    return _checked(value, name_of(bare), task, len(completions))


def reward_function(reward: TaskFamily | Reward, task: Task) -> Reward:
    """The function that judges a task: `reward` itself, or the family's `reward_for(task)` or `reward`."""
    if hasattr(reward, "reward_for"):
        return reward.reward_for(task)
    return reward if callable(reward) else reward.reward


def _checked(value: Any, who: str, task: Task, num: int) -> list[float]:
    """The `num` finite numbers that an answer must be."""
    if hasattr(value, "tolist"):  # a numpy array or a tensor
        value = value.tolist()
    rewards = [_number(reward) for reward in value] if isinstance(value, (list, tuple)) else []
    if len(rewards) != num or any(number is None or not math.isfinite(number) for number in rewards):
        raise RuntimeError(f"{who}: {complaint(value, rewards, num, task)}")
    return rewards


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

"""Judging completions: calls a reward function with a deadline, and accepts nothing but one bounded number each."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import time
from collections.abc import Callable
from typing import Any

from torchtitan_rl.record.tracing import span
from torchtitan_rl.tasks.complaints import complaint, failed, late, name_of, placed
from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.tasks.outcomes import outcome, outcome_in_thread, until
from torchtitan_rl.tasks.reward_parts import Parts, read_parts
from torchtitan_rl.tasks.reward_process import outcome_in_process
from torchtitan_rl.types import Task, is_reward

__all__ = ["judge", "reward_function"]

Reward = Callable[[Task, list[str]], Any]


async def judge(
    reward: TaskFamily | Reward, task: Task, completions: list[str], timeout_s: float, parts: Parts | None = None
) -> list[float]:
    """Rewards of sibling completions: calls `reward` (or the family's), enforces the deadline, checks the answer.

    A plain function runs in a daemon thread, which blocks neither the event loop nor the process's end if it never
    returns; a `cpu_bound` one in a process, which the deadline kills; an async one on this event loop. A reward with a
    method `judged`, such as `rewards.Rewards`, judges by it. `parts` receives the numbers of each part by name.
    Raises RuntimeError, in one line that names function and task, when the reward function raises, gives no answer
    within `timeout_s`, or gives anything but one reward (`types.is_reward`) per completion.
    """
    function, deadline = reward_function(reward, task), time.monotonic() + timeout_s
    if hasattr(function, "judged"):
        return await function.judged(task, completions, timeout_s, parts)
    bare, args = function.func if isinstance(function, functools.partial) else function, (task, list(completions))
    try:
        if getattr(bare, "cpu_bound", False):
            value, error = await outcome_in_process(function, args, timeout_s)
        elif inspect.iscoroutinefunction(function):
            value, error = await until(outcome(function, *args), deadline)
        else:
            value, error = await until(outcome_in_thread(_computed, function, *args), deadline)
            if inspect.isawaitable(value):  # such as a partial or an object whose __call__ is async
                value, error = await until(outcome(lambda: value), deadline)
    except TimeoutError:
        raise RuntimeError(f"{name_of(bare)}: {late(task, timeout_s)}") from None
    if error is not None:
        raise RuntimeError(f"{name_of(bare)}: {failed(error, task)}") from error
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):  # (rewards, parts)
        return read_parts(value, parts, functools.partial(_checked, bare, task, len(completions)), name_of(bare))
    return _checked(bare, task, len(completions), value)


def _computed(function: Reward, *args: Any) -> Any:
    with span("compute rewards"):
        return function(*args)


def reward_function(reward: TaskFamily | Reward, task: Task) -> Reward:
    """The function that judges a task: `reward` itself, or the family's `reward_for(task)` or `reward`."""
    if hasattr(reward, "reward_for"):
        return reward.reward_for(task)
    return reward if callable(reward) else reward.reward


def _checked(function: Callable, task: Task, num: int, value: Any, part: str = "") -> list[float]:
    """The `num` rewards (`types.is_reward`) that an answer, or a part of an answer, must be."""
    value = value.tolist() if hasattr(value, "tolist") else value  # a numpy array or a tensor
    rewards = [_number(reward) for reward in value] if isinstance(value, (list, tuple)) else []
    checked = [number for number in rewards if is_reward(number)]
    if not len(checked) == len(rewards) == num:
        raise RuntimeError(f"{placed(function)}{part}: {complaint(value, rewards, num, task)}")
    return checked


def _number(value: Any) -> float | None:
    """One reward as a float; None for a value that is not a number."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # a numpy scalar or a tensor of one number
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return math.inf

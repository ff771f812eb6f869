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
from torchtitan_rl.record.user_code import defined_at, described, raised_at
from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.tasks.outcomes import outcome, outcome_in_thread, until
from torchtitan_rl.tasks.reward_parts import Parts, read_parts
from torchtitan_rl.tasks.reward_process import RewardProcessError, outcome_in_process
from torchtitan_rl.types import MAX_REWARD, Task, is_reward

__all__ = ["judge", "name_of", "reward_function"]

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
        if getattr(bare, "cpu_bound", False) or getattr(type(bare).__call__, "cpu_bound", False):  # of an object
            value, error = await outcome_in_process(function, args, timeout_s)
        elif inspect.iscoroutinefunction(function):
            value, error = await until(outcome(function, *args), deadline)
        else:
            value, error = await until(outcome_in_thread(_computed, function, *args), deadline)
            if inspect.isawaitable(value):  # such as a partial or an object whose __call__ is async
                value, error = await until(outcome(lambda: value), deadline)
    except TimeoutError:
        raise RuntimeError(
            f"{name_of(bare)}: gave no answer for task {task.id!r} within {timeout_s:g} s; make it faster or allow it "
            "more time"
        ) from None
    if error is not None:
        event = str(error) if isinstance(error, RewardProcessError) else f"raised {described(error)}"
        raise RuntimeError(
            f"{name_of(bare)}: {event} for task {task.id!r}; mend the reward function{raised_at(error)}"
        ) from error
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):  # (rewards, parts)
        return read_parts(value, parts, functools.partial(_checked, bare, task, len(completions)), name_of(bare))
    return _checked(bare, task, len(completions), value)


def _computed(function: Reward, *args: Any) -> Any:
    with span("compute rewards"):
        return function(*args)


def reward_function(reward: TaskFamily | Reward, task: Task) -> Reward:
    """The function that judges a task: `reward` itself, or the family's `reward_for(task)`, `reward_fn` or `reward`."""
    if hasattr(reward, "reward_for"):
        return reward.reward_for(task)
    if callable(reward):
        return reward
    # The function itself and not the method that would call it: a `cpu_bound` mark holds, and errors name it.
    reward_fn = getattr(reward, "reward_fn", None)
    return reward.reward if reward_fn is None else reward_fn


def name_of(function: Callable) -> str:
    """`reward=module:qualname` of a function, a method or a callable object."""
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"reward={function.__module__}:{function.__qualname__}"


def _checked(function: Callable, task: Task, num: int, value: Any, part: str = "") -> list[float]:
    """The `num` rewards (`types.is_reward`) that an answer, or a part of an answer, must be."""
    who = f"{name_of(function)}{defined_at(function)}{part}"
    wanted = f"return a list of {num} finite numbers, one per completion"
    value = value.tolist() if hasattr(value, "tolist") else value  # a numpy array or a tensor
    if not isinstance(value, (list, tuple)):
        returned = "None" if value is None else f"{type(value).__name__} {_shortened(value)}"
        raise RuntimeError(f"{who}: returned {returned} for task {task.id!r}; {wanted}")
    if len(value) != num:
        raise RuntimeError(
            f"{who}: returned {len(value)} rewards for the {num} completions of task {task.id!r}; {wanted}"
        )
    checked: list[float] = []
    for position, reward in enumerate(value):
        number = _number(reward)
        if number is None:
            returned = f"{type(reward).__name__} {_shortened(reward)}"
            raise RuntimeError(f"{who}: returned {returned} at position {position} for task {task.id!r}; {wanted}")
        if not is_reward(number):
            bounds = f", each between {-MAX_REWARD:g} and {MAX_REWARD:g}" if math.isfinite(number) else ""
            raise RuntimeError(
                f"{who}: returned {number} at position {position} for task {task.id!r}; {wanted}{bounds}"
            )
        checked.append(number)
    return checked


def _shortened(value: Any) -> str:
    """The value's repr as one line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _number(value: Any) -> float | None:
    """One reward as a float; None for a value that is not a number."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # a numpy scalar or a tensor of one number
    try:
        return float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return math.inf

"""How completions are judged: reward functions run with a deadline, and nothing they do passes for a reward."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import numbers
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.tasks.reward_process import Pool, RewardProcessError, is_cpu_bound
from torchtitan_rl.types import Task

__all__ = ["judge", "reward_function"]

Reward = Callable[[Task, list[str]], Sequence[float] | Awaitable[Sequence[float]]]

PROCESS_START_S = 120.0
"""For a process to start and to import what a reward function needs; not part of the function's own deadline."""

_pool = Pool()


async def judge(reward: TaskFamily | Reward, task: Task, completions: list[str], timeout_s: float) -> list[float]:
    """Rewards of sibling completions: calls `reward` (or the family's), enforces the deadline, checks the answer.

    Plain functions run in a daemon thread, so that one that never returns blocks neither the event loop nor the
    end of the process; those marked `reward_process.cpu_bound` in one of a pool of processes, which is killed at the
    deadline; async functions are awaited on this event loop. All run side by side with those of other groups.
    Raises RuntimeError, in one line that names function and task, when the reward function raises, gives no answer
    within `timeout_s`, or gives anything but one finite number per completion.
    """
    function = reward_function(reward, task)
    name = f"reward={_function_name(function)}"
    deadline = time.monotonic() + timeout_s
    try:
        if is_cpu_bound(function):
            value, error = await _outcome_in_process(function, task, list(completions), timeout_s)
        elif inspect.iscoroutinefunction(function):
            value, error = await _until(_outcome(function, task, list(completions)), deadline)
        else:
            value, error = await _until(_outcome_in_thread(function, task, list(completions)), deadline)
            if inspect.isawaitable(value):  # such as a partial or an object whose __call__ is async
                value, error = await _until(_outcome(lambda: value), deadline)
    except TimeoutError:
        raise RuntimeError(
            f"{name}: gave no answer for task {task.id!r} within {timeout_s:g} s; make it faster or allow it more time"
        ) from None
    if isinstance(error, RewardProcessError):
        raise RuntimeError(f"{name}: {error} for task {task.id!r}; mend the reward function") from error
    if error is not None:
        message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        raise RuntimeError(f"{name}: raised {message} for task {task.id!r}; mend the reward function") from error
    return _checked_rewards(value, len(completions), name, task)


def reward_function(reward: TaskFamily | Reward, task: Task) -> Reward:
    """The function that judges a task: `reward` itself, or the family's `reward_for(task)` or `reward`."""
    if hasattr(reward, "reward_for"):
        return reward.reward_for(task)
    return reward if callable(reward) else reward.reward


async def _outcome_in_process(
    function: Callable, task: Task, completions: list[str], timeout_s: float
) -> tuple[Any, BaseException | None]:
    """The same as below for a function that is called in another process. Raises TimeoutError.

    The deadline counts from when a process has the function: who waits for a free one has not been late.
    """
    async with _pool.slot():
        process = _pool.take()
        try:
            loaded = _outcome_in_thread(process.load, function)
            try:
                value, error = await _until(loaded, time.monotonic() + PROCESS_START_S)
            except TimeoutError:
                return None, RewardProcessError(f"was not loaded by a process within {PROCESS_START_S:g} s")
            if error is None:
                called = _outcome_in_thread(process.call, task, completions)
                value, error = await _until(called, time.monotonic() + timeout_s)
            _pool.give_back(process)
            process = None
            return value, error
        finally:
            if process is not None:  # it hangs, or nobody waits for its answer any more
                process.kill()


async def _until(outcome: Awaitable[tuple[Any, BaseException | None]], deadline: float) -> tuple:
    """Like `asyncio.wait_for`, but goes on at the deadline even if what it waits for ignores its cancellation."""
    future = asyncio.ensure_future(outcome)
    try:
        done, _ = await asyncio.wait([future], timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError
        return future.result()
    finally:
        future.cancel()


async def _outcome(function: Callable, *args: Any) -> tuple[Any, BaseException | None]:
    """What an async function returned and raised. A cancellation from within must not pass for one of the run."""
    try:
        return await function(*args), None
    except (Exception, asyncio.CancelledError) as error:
        return None, error


def _outcome_in_thread(function: Callable, *args: Any) -> asyncio.Future:
    """The same for a plain function, called in a daemon thread of its own."""
    outcome: Future = Future()
    outcome.set_running_or_notify_cancel()  # from here on a cancellation leaves it alone, and set_result is legal

    def call() -> None:
        try:
            value, error = function(*args), None
        except BaseException as raised:  # SystemExit and StopIteration too: neither can travel through a future
            value, error = None, raised
        outcome.set_result((value, error))

    threading.Thread(target=call, name="reward", daemon=True).start()
    return asyncio.wrap_future(outcome)


def _checked_rewards(value: Any, num_completions: int, name: str, task: Task) -> list[float]:
    wanted = f"return a list of {num_completions} finite numbers, one per completion"
    if hasattr(value, "tolist"):  # a numpy array or a tensor
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        returned = "None" if value is None else f"{type(value).__name__} {_short(value)}"
        raise RuntimeError(f"{name}: returned {returned} for task {task.id!r}; {wanted}")
    if len(value) != num_completions:
        raise RuntimeError(
            f"{name}: returned {len(value)} rewards for the {num_completions} completions of task {task.id!r}; {wanted}"
        )
    return [_checked_reward(reward, i, name, task, wanted) for i, reward in enumerate(value)]


def _checked_reward(value: Any, position: int, name: str, task: Task, wanted: str) -> float:
    where = f"at position {position} for task {task.id!r}"
    number = value
    if getattr(value, "ndim", None) == 0:  # a numpy scalar or a tensor of one number
        number = value.item()
    if not isinstance(number, numbers.Real):
        raise RuntimeError(f"{name}: returned {type(value).__name__} {_short(value)} {where}; {wanted}")
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RuntimeError(f"{name}: returned {number} {where}; {wanted}")
    return number


def _short(value: Any) -> str:
    """One line of at most 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def _function_name(function: Callable) -> str:
    """`module:qualname` of a function, a method, a partial or a callable object."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__qualname__"):
        function = type(function)
    return f"{function.__module__}:{function.__qualname__}"

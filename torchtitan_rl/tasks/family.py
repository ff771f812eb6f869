"""What a task family is, the order a run visits its tasks in, and how completions are judged."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import math
import numbers
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from torchtitan_rl.types import Task

__all__ = ["SPLITS", "TaskFamily", "TaskSource", "judge", "check_index", "check_split", "stable_hash"]

SPLITS = ("train", "validation", "test")

Reward = Callable[[Task, list[str]], Sequence[float] | Awaitable[Sequence[float]]]


class TaskFamily(Protocol):
    """Data, environment and reward together. The three splits share no task.

    Example: `LetterSort(LetterSort.Config()).task("train", 7).prompt == "uqmhvf="`.
    """

    name: str

    # Optional: `environment(task)` makes what the task is played in, over several turns (see `tasks/env.py`); None for
    # a task of one turn.

    def num_tasks(self, split: str) -> int | None:
        """Size of a split; None where tasks are made up as they are asked for, without end."""

    def task(self, split: str, index: int) -> Task:
        """The same task whenever and wherever it is asked for: a function of the config and these two alone."""

    def reward(self, task: Task, completions: list[str]) -> Sequence[float] | Awaitable[Sequence[float]]:
        """One reward per completion; all of them are attempts at `task`. May be an async function."""


class TaskSource:
    """Hands out the tasks of one split in a run's order, and can be resumed.

    A finite split is visited in epochs, each a permutation made from `(seed, epoch)`: no task comes twice within
    one. An endless split is visited by index from `seed * 2**32`, so that runs with other seeds see other tasks.
    Raises ValueError for an empty split and for a negative seed.
    """

    def __init__(self, family: TaskFamily, split: str, seed: int) -> None:
        check_split(split)
        if seed < 0:
            raise ValueError(f"seed={seed}: must not be negative; use 0 or more")
        self.family, self.split, self.seed = family, split, seed
        self.num_tasks = family.num_tasks(split)
        if self.num_tasks is not None and self.num_tasks < 1:
            raise ValueError(
                f"task.{split}: {self.num_tasks} tasks in {family.name}; give this split data, or use another split"
            )
        self.epoch = 0
        self.cursor = 0
        self._order = self._epoch_order()

    def next(self, n: int) -> list[Task]:
        """The next `n` tasks; goes on into the next epoch when this one runs out."""
        return [self.family.task(self.split, self._next_index()) for _ in range(n)]

    def state_dict(self) -> dict[str, int]:
        """Where the source stands; the rest follows from its arguments."""
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a `state_dict()`. Raises ValueError if the split is now too small for it."""
        if self.num_tasks is not None and state["cursor"] > self.num_tasks:
            raise ValueError(
                f"task.{self.split}.cursor={state['cursor']}: the split now has {self.num_tasks} tasks; "
                "resume with the data the run started with"
            )
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self._order = self._epoch_order()

    def _next_index(self) -> int:
        if self._order is None:
            index = self.seed * 2**32 + self.cursor
        else:
            if self.cursor == len(self._order):
                self.epoch, self.cursor = self.epoch + 1, 0
                self._order = self._epoch_order()
            index = self._order[self.cursor]
        self.cursor += 1
        return index

    def _epoch_order(self) -> list[int] | None:
        if self.num_tasks is None:
            return None
        order = list(range(self.num_tasks))
        random.Random(stable_hash(self.seed, self.split, self.epoch)).shuffle(order)
        return order


async def judge(reward: TaskFamily | Reward, task: Task, completions: list[str], timeout_s: float) -> list[float]:
    """Rewards of sibling completions: calls `reward` (or the family's), enforces the deadline, checks the answer.

    Plain functions run in a daemon thread, so that one that never returns blocks neither the event loop nor the
    end of the process; async functions are awaited on this event loop.
    Raises RuntimeError, in one line that names function and task, when the reward function raises, gives no answer
    within `timeout_s`, or gives anything but one finite number per completion.
    """
    function = reward if callable(reward) else reward.reward
    name = f"reward={_function_name(function)}"
    deadline = time.monotonic() + timeout_s
    try:
        if inspect.iscoroutinefunction(function):
            outcome = _outcome(function, task, list(completions))
        else:
            outcome = _outcome_in_thread(function, task, list(completions))
        value, error = await _until(outcome, deadline)
        if inspect.isawaitable(value):  # such as a partial or an object whose __call__ is async
            value, error = await _until(_outcome(lambda: value), deadline)
    except TimeoutError:
        raise RuntimeError(
            f"{name}: gave no answer for task {task.id!r} within {timeout_s:g} s; make it faster or allow it more time"
        ) from None
    if error is not None:
        message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
        raise RuntimeError(f"{name}: raised {message} for task {task.id!r}; mend the reward function") from error
    return _checked_rewards(value, len(completions), name, task)


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


def check_split(split: str) -> None:
    """Raises ValueError unless `split` is one of `SPLITS`."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: is not a split; use one of {', '.join(SPLITS)}")


def check_index(family: TaskFamily, split: str, index: int) -> None:
    """Raises IndexError unless the split has a task of this index, ValueError if there is no such split."""
    check_split(split)
    num_tasks = family.num_tasks(split)
    if index < 0 or (num_tasks is not None and index >= num_tasks):
        size = "no end" if num_tasks is None else f"{num_tasks} tasks"
        raise IndexError(f"index={index}: {family.name} has {size} in {split}, counted from 0; use an index within")


def stable_hash(*parts: Any) -> int:
    """64 bits that depend on the parts alone; Python's own hash of a string differs between processes."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

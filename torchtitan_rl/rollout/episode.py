"""One play of an environment, with checks: one use, calls in order, answers in time and of the right type."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.tasks.env import Env, Observation, Step
from torchtitan_rl.tasks.outcomes import is_cancellation
from torchtitan_rl.types import A_REWARD, Task, is_reward

__all__ = ["Episode", "EnvironmentFailed", "environment_of"]


logger = logging.getLogger(__name__)


class EnvironmentFailed(RuntimeError):
    """An environment raised, was late, or gave something else than it may."""


def environment_of(environment: Callable[[Task], Any], task: Task) -> Any:
    """What a family's `environment(task)` returns. Raises EnvironmentFailed for whatever it raises.

    It runs on the event loop, without a deadline: in a thread of each rollout the first requests of siblings would
    leave in any order, and tasks of one turn would not repeat their bytes.
    """
    try:
        with span("run an environment"):
            return environment(task)
    except (Exception, SystemExit) as error:
        raise EnvironmentFailed(f"environment(task) raised {_one_line(error)} for task {task.id!r}; mend it") from error


class Episode:
    """Calls an environment on behalf of a runner.

    Raises EnvironmentFailed, in one line that names environment and task, when the environment has been played before,
    raises, gives no answer within `timeout_s`, is stepped after its end, or answers anything but an observation or a
    `Step`.
    """

    def __init__(self, env: Env, task: Task, timeout_s: float) -> None:
        self.env, self.task, self.timeout_s = env, task, timeout_s
        self.name = f"environment={type(env).__name__}"
        if not isinstance(env, Env):
            raise EnvironmentFailed(
                f"{self.name}: is not an Env, for task {task.id!r}; return one from environment(task)"
            )
        if env.played:
            raise EnvironmentFailed(
                f"{self.name}: has been played before, for task {task.id!r}; make a new one for every rollout"
            )
        env.played = True
        self._steppable = False
        self._thread: Future | None = None
        """The call that a thread makes, or made last."""

    async def reset(self) -> Observation:
        observation = self._checked(await self._call("reset"), "reset")
        self._steppable = True
        return observation

    async def step(self, text: str) -> Step:
        if not self._steppable:
            raise EnvironmentFailed(
                f"{self.name}: step before reset or after the end, for task {self.task.id!r}; play it "
                "once, from reset until done"
            )
        step = await self._call("step", text)
        if not isinstance(step, Step):
            raise EnvironmentFailed(
                f"{self.name}: step returned {type(step).__name__} for task {self.task.id!r}; return a Step"
            )
        if not is_reward(step.reward):
            raise EnvironmentFailed(
                f"{self.name}: step gave reward {step.reward!r} for task {self.task.id!r}; give {A_REWARD}"
            )
        for name, number in step.reward_parts.items():
            if not is_reward(number):
                raise EnvironmentFailed(
                    f"{self.name}: step gave reward part {name!r} {number!r} for task {self.task.id!r}; give {A_REWARD}"
                )
        if not step.done:
            self._checked(step.observation, "step")
        self._steppable = not step.done
        return step

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        """Closes the environment after the block. Where the block fails a failure of `close` is only logged, because it
        may follow from the block's and would hide it."""
        try:
            yield
        except BaseException:
            try:
                await self.close()
            except EnvironmentFailed as error:
                logger.warning("%s; the rollout had failed before", error)
            raise
        await self.close()

    async def close(self) -> None:
        """Has the environment release what it holds, with the deadline of a step. Where a call that was late is still
        under way in its thread, this is done there afterwards and not awaited."""
        if type(self.env).close is Env.close:
            return
        if self._thread is not None and not self._thread.done():
            self._thread.add_done_callback(lambda _: self._close_now())
            return
        await self._call("close")

    def _close_now(self) -> None:
        if (closing := self.env.close()) is not None:
            asyncio.run(_awaited(closing))

    def check_sums(self, reward: float, parts: dict[str, float]) -> None:
        """Refuses sums over all steps that are no rewards."""
        for name, total in {"rewards": reward, **{f"parts {name!r}": total for name, total in parts.items()}}.items():
            if not is_reward(total):
                raise EnvironmentFailed(
                    f"{self.name}: the {name} of its steps add up to {total:g} for task {self.task.id!r}; keep the sum "
                    f"{A_REWARD}"
                )

    async def _call(self, method: str, *args: Any) -> Any:
        function = getattr(self.env, method)
        try:
            async with asyncio.timeout(self.timeout_s) as scope:
                with span("wait for an environment"):
                    if inspect.iscoroutinefunction(function):
                        return await running("run an environment", function(*args))
                    self._thread = Future()
                    value = await _in_thread(self._thread, function, *args)
                    return await value if inspect.isawaitable(value) else value
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            if is_cancellation(error):
                raise
            if isinstance(error, TimeoutError) and scope.expired():
                raise EnvironmentFailed(
                    f"{self.name}: {method} gave no answer for task {self.task.id!r} within "
                    f"{self.timeout_s:g} s; speed it up or raise controller.reward_timeout_s"
                ) from None
            raise EnvironmentFailed(
                f"{self.name}: {method} raised {_one_line(error)} for task {self.task.id!r}; mend it"
            ) from error

    def _checked(self, observation: Any, method: str) -> Observation:
        if isinstance(observation, str):
            return observation
        if isinstance(observation, list) and observation:
            if all(isinstance(entry, dict) and "role" in entry for entry in observation):
                return observation
            if all(type(entry) is int for entry in observation):
                return observation
        raise EnvironmentFailed(
            f"{self.name}: {method} gave {type(observation).__name__} {repr(observation)[:80]} for task "
            f"{self.task.id!r}; give text, a list of messages or a list of tokens"
        )


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")


async def _awaited(result: Awaitable[None]) -> None:
    await result


async def _in_thread(outcome: Future, function: Callable, *args: Any) -> Any:
    """Runs `function` in a daemon thread, which blocks neither the event loop nor the process's end if it never
    returns. `outcome` is done once the function has returned."""
    outcome.set_running_or_notify_cancel()  # no cancellation from here on: set_result is always legal

    def call() -> None:
        try:
            with span("run an environment"):
                value = function(*args)
            outcome.set_result((value, None))
        except BaseException as error:  # SystemExit and StopIteration too: neither can travel through a future
            outcome.set_result((None, error))

    threading.Thread(target=call, name="environment", daemon=True).start()
    value, error = await asyncio.wrap_future(outcome)
    if isinstance(error, (SystemExit, StopIteration)):
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if error is not None:
        raise error
    return value

"""A reward function with limits of its own: calls at a time, retries, a deadline."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.tasks.judging import judge, name_of
from torchtitan_rl.tasks.reward_parts import Parts
from torchtitan_rl.types import Task

__all__ = ["Limited", "PerLoop", "log_retries"]

logger = logging.getLogger(__name__)


def log_retries(before: int, now: int, why: str) -> None:
    """Logs the 1st, 10th, 100th ... retry as a warning, the others quietly: a service may fail one call in ten.
    `before` and `now` are numbers of retries so far."""
    loud = not before or len(str(now)) > len(str(before))
    logger.log(logging.WARNING if loud else logging.DEBUG, "retry %d of a reward: %s", now, why)


class PerLoop:
    """A value that belongs to one event loop, made when a loop first asks. Copies and pickles begin without it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._value: Any = None

    def get(self, make: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._value = loop, make()
        return self._value

    def __reduce__(self) -> tuple:
        return PerLoop, ()


@dataclass(slots=True)
class Limited:
    """A reward function that at most `concurrency` groups ask at a time, each up to `retries` times again.

    What fails after the last retry is a failed reward of the run: `algorithm.on_rollout_failure` says what follows.

    Example: `Limited(asks_a_service, concurrency=4, retries=2, timeout_s=20)`. Raises ValueError for limits that allow
    nothing.
    """

    function: Callable
    """The reward function, plain or async. A plain function that is late goes on in its thread, unless `cpu_bound`."""
    concurrency: int = 8
    """Calls at a time. One call judges the completions of one group."""
    retries: int = 2
    """Further tries of a call that raises, is late, or does not give one finite number per completion."""
    timeout_s: float = 0.0
    """Seconds of one try, waiting for a turn not included; 0: `controller.reward_timeout_s`."""
    wait_s: float = 0.5
    """Seconds before the first retry; each further wait is twice as long."""
    _slots: PerLoop = field(default_factory=PerLoop, init=False, repr=False, compare=False)
    _retried: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(f"limited.function={self.function!r}: is not callable; give a reward function")
        for name, least in (("concurrency", 1), ("retries", 0)):
            if not isinstance(value := getattr(self, name), int):
                raise ValueError(f"limited.{name}={value!r}: is no whole number; use {least} or more")
        if self.concurrency < 1:
            raise ValueError(f"limited.concurrency={self.concurrency}: allows no call; use 1 or more")
        for name in ("retries", "timeout_s", "wait_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"limited.{name}={getattr(self, name)}: is not possible; use 0 or more")

    async def __call__(self, task: Task, completions: list[str]) -> tuple[list[float], Parts]:
        """(rewards, parts), for a family's own `reward` method."""
        parts: Parts = {}
        return await self.judged(task, completions, math.inf, parts), parts

    async def judged(
        self, task: Task, completions: list[str], timeout_s: float, parts: Parts | None = None
    ) -> list[float]:
        """The function's rewards. Raises RuntimeError after the last retry."""
        async with self._slots.get(lambda: asyncio.Semaphore(self.concurrency)):
            for retry in range(self.retries + 1):
                try:
                    return await self._tried(task, completions, timeout_s, parts)
                except RuntimeError as error:
                    last = error
                if retry < self.retries:
                    self._retried += 1
                    log_retries(self._retried - 1, self._retried, str(last))
                    await asyncio.sleep(self.wait_s * 2**retry)
        raise RuntimeError(f"{last} ({self.retries} retries)") from last

    async def _tried(self, task: Task, completions: list[str], timeout_s: float, parts: Parts | None) -> list[float]:
        """One try. A function that judges by a method of its own, such as an `HttpJudge`, may have a longer deadline of
        its own: this one counts too."""
        if not (self.timeout_s and hasattr(self.function, "judged")):
            return await judge(self.function, task, completions, self.timeout_s or timeout_s, parts)
        try:
            async with asyncio.timeout(self.timeout_s):
                return await judge(self.function, task, completions, self.timeout_s, parts)
        except TimeoutError:
            raise RuntimeError(
                f"{name_of(self.function)}: gave no answer for task {task.id!r} within {self.timeout_s:g} s; make it "
                "faster or allow it more time"
            ) from None

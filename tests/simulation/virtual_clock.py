"""An event loop whose time is virtual: where nothing is ready, the clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

__all__ = ["Stuck", "VirtualLoop"]


class Stuck(Exception):
    """A wait without an end: nothing is ready and no timer is set, or the clock has passed the limit."""


class _Jump(selectors.SelectSelector):
    """Waits for no file: moves the loop's clock forward by as long as the loop would have waited."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise Stuck(f"nothing is ready and no timer is set at {self.loop.now:.1f} s")
        if timeout > 0:
            self.loop.now += timeout
            if self.loop.now > self.loop.limit_s:
                raise Stuck(f"the run is not over after {self.loop.limit_s:g} virtual seconds")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in the order of their virtual times, without a wait. Functions for other threads run at once, on
    the thread of the loop. Raises Stuck from `run_until_complete`."""

    def __init__(self, *, now: float, limit_s: float) -> None:
        self.now, self.limit_s = now, limit_s
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the beginning of the simulation."""
        return self.now

    def run_in_executor(self, executor: Any, function: Callable, *args: Any) -> asyncio.Future:  # type: ignore[override]
        """The result of `function(*args)`, which has run when this method returns."""
        future = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def run_to_the_end(self) -> None:
        """Cancels every task, lets each end, and closes the loop."""
        self.limit_s = float("inf")
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                self.run_until_complete(asyncio.wait(tasks, timeout=1000))
        except Stuck:  # a task that waits for another one that was cancelled
            pass
        self.close()

"""An event loop whose time is virtual: where nothing is ready, the clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Stuck", "VirtualLoop"]


class Stuck(Exception):
    """A wait without an end: nothing is ready and no timer is set, or the clock has passed the limit."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their virtual times, and those of one time in the order in which they were set.
    Functions for other threads run at once, on the thread of the loop. Raises Stuck from `run_until_complete`.

    A turn of this loop looks at no file, signal or thread.
    """

    _ready: deque[asyncio.Handle]  # of asyncio's own loop, which fills it too
    _stopping: bool

    def __init__(self, *, now: float, limit_s: float) -> None:
        self.now, self.limit_s = now, limit_s
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        super().__init__()

    def call_soon(self, callback: Callable, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(self, when: float, callback: Callable, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(self, delay: float, callback: Callable, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        """One turn, as asyncio's: what is due joins what is ready, and what is ready now runs."""
        ready, timers = self._ready, self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not (ready or self._stopping):
            self._jump(timers)
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _jump(self, timers: list[tuple[float, int, asyncio.TimerHandle]]) -> None:
        """Moves the clock to the next timer. Raises Stuck where there is none, and beyond the limit."""
        if not timers:
            raise Stuck(f"nothing is ready and no timer is set at {self.now:.1f} s")
        self.now = max(self.now, timers[0][0])
        if self.now > self.limit_s:
            raise Stuck(f"the run is not over after {self.limit_s:g} virtual seconds")

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

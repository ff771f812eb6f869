"""The requests of one message to a generator, and their answers until they are sent back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

__all__ = ["Ticket"]

_WAIT_SHARE = 0.1
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.02, 0.2


class Ticket:
    """Futures that the engine's thread completes, and an event loop that takes the completed ones several at a time.

    A message between two processes costs each of them .6 ms of processor time, and where processors are few the engine
    stands still meanwhile. So an answer waits for the next ones, a tenth of the time that it has taken itself, 20 ms at
    least and .2 s at most. The last answer of a ticket waits for none."""

    def __init__(self, futures: Sequence[Future]) -> None:
        """Belongs to the event loop that runs."""
        self._loop, self._began = asyncio.get_running_loop(), time.monotonic()
        self._wakes = asyncio.Event()
        self._lock = threading.Lock()
        self._done: list[tuple[int, Future]] = []
        """Completed and not taken yet, each with its index."""
        self._num_wanted = 1
        """As many completed ones wake the event loop, which would take the interpreter's lock from the engine each
        time."""
        self._num_left = len(futures)
        """Those that are not taken."""
        for index, future in enumerate(futures):
            future.add_done_callback(partial(self._complete, index))

    @property
    def is_over(self) -> bool:
        """Whether all futures are taken."""
        return not self._num_left

    async def next(self) -> list[tuple[int, Future]]:
        """Waits for completed futures and takes them, each with its index, in the order of these."""
        await self._until(1, None)
        elapsed_s = time.monotonic() - self._began
        wait_s = min(max(_SHORTEST_WAIT_S, _WAIT_SHARE * elapsed_s), _LONGEST_WAIT_S)
        await self._until(self._num_left, wait_s)
        with self._lock:
            done, self._done = self._done, []
        self._num_left -= len(done)
        return sorted(done, key=lambda entry: entry[0])

    async def _until(self, number: int, timeout_s: float | None) -> None:
        """Waits until so many futures are completed and not taken, or until the time has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:  # a wake-up may still be under way when the number that is wanted has grown
                    self._wakes.clear()
                    with self._lock:
                        self._num_wanted = number
                        if len(self._done) >= number:
                            return
                    await self._wakes.wait()

    def _complete(self, index: int, future: Future) -> None:
        with self._lock:
            self._done.append((index, future))
            if len(self._done) < self._num_wanted or self._loop.is_closed():
                return
        self._loop.call_soon_threadsafe(self._wakes.set)

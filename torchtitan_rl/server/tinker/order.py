"""The requests of one model, in the order of their numbers, whatever order they arrive in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from torchtitan_rl.server.tinker.faults import user
from torchtitan_rl.server.tinker.futures import Answer, Futures

__all__ = ["InOrder"]

Start = Callable[[], Awaitable[Awaitable[Answer]]]
"""Submits a request to the trainer, then gives what waits for its answer."""


class InOrder:
    """Starts each request once those before it were submitted; does not wait for their answers.

    A number that stays away holds those behind it back for `gap_s` seconds. Then they fail, and the next number counts
    on from them.
    """

    def __init__(self, futures: Futures, *, gap_s: float = 360.0) -> None:
        self._futures, self._next, self._gap_s = futures, 1, gap_s
        self._waiting: dict[int, tuple[str, Start]] = {}
        self._changed = asyncio.Event()
        self._task: asyncio.Task | None = None
        self.closed = ""
        """Why no request is taken any more; empty while some are."""

    def submit(self, seq_id: int, request_id: str, start: Start) -> None:
        """Takes a request. One whose number has been is the same request again: nothing runs."""
        if request_id in self._futures:
            return
        self._futures.reserve(request_id)
        if self.closed:
            self._futures.fail(request_id, user(self.closed))
            return
        if seq_id and seq_id < self._next:
            self._futures.fail(
                request_id,
                user(f"seq_id={seq_id}: has been answered, and its answer expired; send the next, {self._next}"),
            )
            return
        if seq_id - self._next > 100_000:
            self._futures.fail(request_id, user(f"seq_id={seq_id}: is far ahead of the next, {self._next}; count on"))
            return
        self._waiting[seq_id or self._unnumbered()] = (request_id, start)
        self._changed.set()
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def _unnumbered(self) -> int:
        """The number for a request without one: the first that is free."""
        number = self._next
        while number in self._waiting:
            number += 1
        return number

    async def _run(self) -> None:
        while True:
            while (entry := self._waiting.pop(self._next, None)) is None:
                self._changed.clear()
                try:
                    async with asyncio.timeout(self._gap_s if self._waiting else None):
                        await self._changed.wait()
                except TimeoutError:
                    self._give_up()
            request_id, start = entry
            try:
                answering = await start()
            except Exception as error:
                self._futures.fail(request_id, error)
            else:
                self._futures.start(request_id, answering)
            self._next += 1

    def _give_up(self) -> None:
        missing, waiting = self._next, sorted(self._waiting)
        for seq_id in waiting:
            request_id, _ = self._waiting.pop(seq_id)
            self._futures.fail(
                request_id,
                user(f"seq_id={seq_id}: waited {self._gap_s:g} s for seq_id={missing}, which never came; send all"),
            )
        self._next = waiting[-1] + 1

    def close(self, why: str) -> None:
        """Fails what waits; later requests fail with the same sentence."""
        self.closed = why
        for request_id, _ in self._waiting.values():
            self._futures.fail(request_id, user(why))
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

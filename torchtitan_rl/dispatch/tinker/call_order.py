"""Calls to a service in the order they were made, also where a call takes several requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

__all__ = ["CallOrder", "done"]

_Answer = TypeVar("_Answer")


class CallOrder:
    """A queue of calls. A call holds the queue until all of its requests are sent, and not until they are answered."""

    def __init__(self) -> None:
        self._placed: asyncio.Future[None] | None = None
        """Done once the call before has sent all of its requests."""

    def submit(self, send: Callable[[], Awaitable[Awaitable[_Answer]]]) -> asyncio.Future[_Answer]:
        """Runs `send` once every call before has sent its requests. `send` returns the answer, still to be awaited.
        The call has its place when this method returns."""
        before, placed = self._placed, asyncio.get_running_loop().create_future()
        self._placed = placed

        async def run() -> _Answer:
            if before is not None:
                await asyncio.shield(before)
            try:
                answer = await send()
            finally:
                release()
            return await answer

        def release(_: Any = None) -> None:
            if not placed.done():
                placed.set_result(None)

        def ended(task: asyncio.Future) -> None:
            if before is None or before.done():
                release()
            else:  # cancelled while it waited: the place is given on when its turn comes
                before.add_done_callback(release)

        task = asyncio.ensure_future(run())
        task.add_done_callback(ended)
        return task


def done(value: Any) -> asyncio.Future[Any]:
    """A future that has a result."""
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future

"""Calls of a user's functions. An outcome is (returned value, None) or (None, raised exception)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Outcome", "is_cancellation", "outcome", "outcome_in_thread", "until"]

Outcome = tuple[Any, BaseException | None]


async def until(awaited: Awaitable[Outcome], deadline: float) -> Outcome:
    """The outcome. Raises TimeoutError at `deadline` (a time of `time.monotonic`), even if `awaited` ignores its
    cancellation; `asyncio.wait_for` would wait for the cancellation to take effect."""
    future = asyncio.ensure_future(awaited)
    try:
        done, _ = await asyncio.wait([future], timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError
        return future.result()
    finally:
        future.cancel()


async def outcome(function: Callable, *args: Any) -> Outcome:
    """Outcome of an async function. A CancelledError that the function raises must not look like the run's own, and its
    SystemExit must not end the event loop."""
    try:
        return await function(*args), None
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        return None, error


def is_cancellation(error: BaseException) -> bool:
    """Whether an error that the current task has caught is its own cancellation, which it has to raise again, and not a
    CancelledError that a user's function raised."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def outcome_in_thread(function: Callable, *args: Any) -> asyncio.Future:
    """Future outcome of a plain function, called in a daemon thread of its own."""
    future: Future = Future()
    future.set_running_or_notify_cancel()  # no cancellation from here on: set_result is always legal

    def call() -> None:
        try:
            value, error = function(*args), None
        except BaseException as raised:  # SystemExit and StopIteration too: neither can travel through a future
            value, error = None, raised
        future.set_result((value, error))

    threading.Thread(target=call, name="reward", daemon=True).start()
    return asyncio.wrap_future(future)

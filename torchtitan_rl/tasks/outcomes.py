"""Calls of functions that nobody can vouch for: an outcome is (what it returned, None) or (None, what it raised)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Outcome", "outcome", "outcome_in_thread", "until"]

Outcome = tuple[Any, BaseException | None]


async def until(awaited: Awaitable[Outcome], deadline: float) -> Outcome:
    """The outcome, or TimeoutError at the deadline (of `time.monotonic`), even if the awaited ignores its cancellation.

    `asyncio.wait_for` would wait for the cancellation to take effect.
    """
    future = asyncio.ensure_future(awaited)
    try:
        done, _ = await asyncio.wait([future], timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TimeoutError
        return future.result()
    finally:
        future.cancel()


async def outcome(function: Callable, *args: Any) -> Outcome:
    """Of an async function. A cancellation from within must not pass for a cancellation of the run."""
    try:
        return await function(*args), None
    except (Exception, asyncio.CancelledError) as error:
        return None, error


def outcome_in_thread(function: Callable, *args: Any) -> asyncio.Future:
    """Of a plain function, called in a daemon thread of its own."""
    future: Future = Future()
    future.set_running_or_notify_cancel()  # from here on a cancellation leaves it alone, and set_result is legal

    def call() -> None:
        try:
            value, error = function(*args), None
        except BaseException as raised:  # SystemExit and StopIteration too: neither can travel through a future
            value, error = None, raised
        future.set_result((value, error))

    threading.Thread(target=call, name="reward", daemon=True).start()
    return asyncio.wrap_future(future)

"""How a verb ends: its exit status, the line on a failure, the end of a process whose threads may hang."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from torchtitan_rl.record.console.json_stderr import filter_stderr
from torchtitan_rl.record.console.notices import is_json, say

__all__ = ["end_with", "fail", "flush"]


def end_with(coroutine: Coroutine[Any, Any, int], status: Callable[[int], int] = int) -> int:
    """Runs a coroutine, which returns the exit status; Ctrl-C gives 130. Ends this process, with `status(code)`."""
    if is_json():
        filter_stderr()
    try:
        code = asyncio.run(coroutine)
    except KeyboardInterrupt:
        code = 130
    code = status(code)
    with suppress(OSError):  # a full disk does not keep the process either
        flush()
    # Threads of Monarch, or of a reward that hangs, must not keep a finished run alive.
    os._exit(code)


def flush() -> None:
    """Writes what was printed. Nothing is left for a stream that is closed (`>&-`) or whose reader is gone (`| head`):
    Python would fail on it once more at its end."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(message: str) -> int:
    """Prints an error, at most three lines. Returns the exit status."""
    lines = message.strip().splitlines()[:3] or ["unknown"]
    say("\n".join(["error: " + lines[0], *lines[1:]]), event="error", level="error")
    return 1

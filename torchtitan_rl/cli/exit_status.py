"""How a verb ends: its exit status, the line on a failure, the end of a process whose threads may hang."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from torchtitan_rl.record.console.json_stderr import filter_stderr
from torchtitan_rl.record.console.notices import is_json, say

__all__ = ["end_with", "fail"]


def end_with(coroutine: Coroutine[Any, Any, int], status: Callable[[int], int] = int) -> int:
    """Runs a coroutine, which returns the exit status; Ctrl-C gives 130. Ends this process, with `status(code)`."""
    if is_json():
        filter_stderr()
    try:
        code = asyncio.run(coroutine)
    except KeyboardInterrupt:
        code = 130
    code = status(code)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of Monarch, or of a reward that hangs, must not keep a finished run alive.
    os._exit(code)


def fail(message: str) -> int:
    """Prints an error, at most three lines. Returns the exit status."""
    lines = message.strip().splitlines()[:3] or ["unknown"]
    say("\n".join(["error: " + lines[0], *lines[1:]]), event="error", level="error")
    return 1

"""Signs of life of a controller: a supervisor kills a controller that gives none, and begins another attempt.

The controller's event loop writes every few seconds, and promises the next sign within so many seconds. Torch's own
watchdog for elastic workers (`FileTimerServer`) ends the supervisor together with the worker: nobody would begin again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_rl.record.console.notices import say

__all__ = ["LOOK_EVERY_S", "SIGNS_OF_LIFE", "SIGN_EVERY_S", "START_S", "sign_of_life", "alive", "SignsOfLife", "watch"]

SIGNS_OF_LIFE = "TORCHTITAN_RL_SIGNS_OF_LIFE"
"""The environment variable with the file of the signs of life; the supervisor sets it for the controller."""
START_S = 300.0
"""Seconds from the start of the process to the first sign of life of its event loop: imports, and a config's code."""
SIGN_EVERY_S = 5.0
"""Seconds between two signs, or a quarter of what is promised: a sign is a small file."""
LOOK_EVERY_S = 1.0
"""Seconds between two looks at the file: little beside any promise."""


def sign_of_life(within_s: float) -> None:
    """Promises another sign of life within `within_s` seconds. Does nothing without a supervisor."""
    if name := os.environ.get(SIGNS_OF_LIFE):
        beside = Path(f"{name}.new")
        try:
            beside.write_text(json.dumps({"pid": os.getpid(), "within_s": within_s}))
            beside.rename(name)
        except OSError:  # a full disk takes no file, but another date of the last one
            if os.path.exists(name):
                os.utime(name)


@contextmanager
def alive(hang_timeout_s: float) -> Iterator[None]:
    """Gives signs of life from the running event loop, while the block runs."""

    async def beat() -> None:
        while True:
            sign_of_life(hang_timeout_s)
            await asyncio.sleep(min(SIGN_EVERY_S, hang_timeout_s / 4))

    beating = asyncio.ensure_future(beat()) if SIGNS_OF_LIFE in os.environ else None
    try:
        yield
    finally:
        if beating is not None:
            beating.cancel()


class SignsOfLife:
    """The supervisor's view of the file. How old a sign is, is counted by the monotonic clock: the time of day jumps
    where a host was suspended or its clock is set, and a controller that was suspended too is no hanging one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._written, self._seen = 0, 0.0
        """The file's time, and when this process first saw it."""

    def end_if_overdue(self) -> None:
        """Kills the process whose next sign of life is overdue, and prints that on stderr."""
        try:
            promise, written = json.loads(self._file.read_text()), self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return
        if written != self._written:
            self._written, self._seen = written, time.monotonic()
        if time.monotonic() - self._seen > promise["within_s"]:
            try:
                os.kill(promise["pid"], signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._file.unlink()  # the next attempt has not promised anything yet
            say(
                f"error: the controller (pid {promise['pid']}) gave no sign of life for {promise['within_s']:g} s "
                "(controller.hang_timeout_s) and was killed",
                event="error",
                level="error",
            )


@contextmanager
def watch(file: Path) -> Iterator[None]:
    """Lets child processes give signs of life in `file`, and kills one that is overdue, while the block runs."""
    done, signs_of_life = threading.Event(), SignsOfLife(file)

    def look() -> None:
        while not done.wait(LOOK_EVERY_S):
            signs_of_life.end_if_overdue()

    os.environ[SIGNS_OF_LIFE] = str(file)
    threading.Thread(target=look, daemon=True).start()
    try:
        yield
    finally:
        done.set()
        del os.environ[SIGNS_OF_LIFE]

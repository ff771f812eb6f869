"""What a command left behind. Other tests, or another run of the tests, may use the machine meanwhile."""

import ctypes
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_OF_THE_MACHINE = {"libpod_lock"}  # podman's: begun by its first command, of the tests of containers, and never ended


def abandoned(before: set[str]) -> set[str]:
    """Segments of shared memory that are new and that no process maps. Directories are the simulator's."""
    left = {file.name for file in Path("/dev/shm").iterdir() if not file.is_dir()}
    left -= before | _OF_THE_MACHINE
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        try:
            text = maps.read_text()
        except OSError:
            continue  # the process has ended
        left = {name for name in left if name not in text}
    return left


@contextmanager
def adopts_orphans() -> Iterator[None]:
    """While this lasts, descendants whose parent ends become this process's children, where init's they would be."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def orphans(before: set[psutil.Process]) -> list[str]:
    """Monarch processes that this one has adopted since `before`, its earlier children."""
    commands = []
    for process in set(psutil.Process().children()) - before:
        try:
            command = " ".join(process.cmdline())  # empty for one that has ended, whom nobody has waited for
        except psutil.Error:
            continue
        if "monarch" in command:
            commands.append(f"process {process.pid}: {command[:200]}")
    return commands


@contextmanager
def nothing_left(within_s: float = 5) -> Iterator[None]:
    """Fails unless, `within_s` seconds after the body, its segments and its processes are gone."""
    segments, children = set(os.listdir("/dev/shm")), set(psutil.Process().children())
    with adopts_orphans():
        yield
        deadline = time.monotonic() + within_s
        while (left := [*sorted(abandoned(segments)), *orphans(children)]) and time.monotonic() < deadline:
            time.sleep(0.2)
    assert left == [], f"{left} is left {within_s} s after the end"

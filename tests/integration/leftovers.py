"""What a command left behind. Other programs, another run of the tests among them, may use the machine meanwhile."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


def abandoned(before: set[str]) -> set[str]:
    """Segments of shared memory that are new and that no process maps. Directories are the simulator's."""
    left = {file.name for file in Path("/dev/shm").iterdir() if not file.is_dir()} - before
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        try:
            text = maps.read_text()
        except OSError:
            continue  # the process has ended
        left = {name for name in left if name not in text}
    return left


def orphans() -> list[str]:
    """Monarch processes without a parent."""
    commands = [
        " ".join(process.info["cmdline"] or [])
        for process in psutil.process_iter(["cmdline", "ppid"])
        if process.info["ppid"] == 1
    ]
    return [command[:80] for command in commands if "monarch" in command]


@contextmanager
def nothing_left(within_s: float = 5) -> Iterator[None]:
    """Fails unless, `within_s` seconds after the body, its segments and its processes are gone."""
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + within_s
    while (left := [*sorted(abandoned(before)), *orphans()]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []

"""What a command left behind. Other tests, or another run of the tests, may use the machine meanwhile."""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_BODY = "TORCHTITAN_RL_TEST_BODY"
"""The environment variable that names the body of `nothing_left` which a process has begun in."""
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


def orphans(body: str) -> list[str]:
    """Monarch processes without a parent that have begun in a body, and their command lines."""
    commands = []
    for process in psutil.process_iter(["cmdline", "ppid"]):
        command = " ".join(process.info["cmdline"] or [])
        if process.info["ppid"] == 1 and "monarch" in command:
            with suppress(psutil.Error):  # it has ended by now
                if process.environ().get(_BODY) == body:
                    commands.append(f"process {process.pid}: {command[:200]}")
    return commands


@contextmanager
def nothing_left(within_s: float = 5) -> Iterator[None]:
    """Fails unless, `within_s` seconds after the body, its segments and its processes are gone."""
    segments, outer, body = set(os.listdir("/dev/shm")), os.environ.get(_BODY), uuid.uuid4().hex
    os.environ[_BODY] = body
    try:
        yield
    finally:
        del os.environ[_BODY]
        if outer is not None:
            os.environ[_BODY] = outer
    deadline = time.monotonic() + within_s
    while (left := [*sorted(abandoned(segments)), *orphans(body)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == [], f"{left} is left {within_s} s after the end"

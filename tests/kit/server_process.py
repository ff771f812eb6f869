"""A server in a process of its own, as a user starts one."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]


@contextmanager
def server_process(arguments: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """Python with these arguments, whose output is added to `log`. The process and all that it started end with the
    context."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with open(log, "ab") as file:
        process = subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=file, cwd=ROOT, env=environment)
    try:
        yield process
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(20)
        finally:
            for child in children:
                if child.is_running():
                    child.kill()
            process.kill()


def printed(process: subprocess.Popen, log: Path, pattern: str, *, within_s: float = 150, number: int = 1) -> re.Match:
    """The place at which the server has printed what matches the pattern for the `number`-th time: that it answers."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        text = log.read_text(errors="replace")
        if len(matches := list(re.finditer(pattern, text))) >= number:
            return matches[-1]
        assert process.poll() is None, text[-3000:]
        time.sleep(0.1)
    raise AssertionError(f"no server after {within_s} s: {log.read_text(errors='replace')[-3000:]}")

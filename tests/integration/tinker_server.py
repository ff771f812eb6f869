"""A server for Tinker's SDK in a process of its own, as a user starts one."""

import os
import re
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil

from tests.integration.conftest import ROOT


@contextmanager
def tinker_server(directory, *options, start_s=90):
    """Yields (url, process); the process's output is in DIRECTORY/server.log."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "server.log"
    command = [sys.executable, "-m", "torchtitan_rl.cli", "serve-tinker", str(ROOT / "configs" / "quickstart.py")]
    command += ["--output-dir", str(directory / "run"), *(() if "--port" in options else ("--port", "0"))]
    command += [*(() if "--max-restarts" in options else ("--max-restarts", "0")), *options]
    with open(log, "ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        yield wait_for_url(process, log, start_s), process
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


def wait_for_url(process, log, start_s=90, number=1):
    """The URL that the server prints, at its start number `number`."""
    end = time.monotonic() + start_s
    while time.monotonic() < end:
        if len(found := re.findall(r"serving TINKER_BASE_URL=(\S+)", log.read_text(errors="replace"))) >= number:
            return found[-1]
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        time.sleep(0.1)
    raise AssertionError(f"no server after {start_s} s: {log.read_text(errors='replace')[-3000:]}")

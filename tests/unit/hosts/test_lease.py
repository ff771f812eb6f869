"""A worker and its controller, with real sockets and processes: silence ends what was started, a goodbye does not."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from torchtitan_rl.hosts import lease as lease_module
from torchtitan_rl.hosts.lease import Lease

WORKER = """
import os, subprocess, sys, time
if os.environ.get("STARTED"):
    print("again", flush=True)
    time.sleep(60)
os.environ["STARTED"] = "1"
from torchtitan_rl.environment import end_with_parent
from torchtitan_rl.hosts import lease
end_with_parent(9)
import socket
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]
lease.serve("127.0.0.1", port, "tcp://127.0.0.1:7")
child = subprocess.Popen(["sleep", "60"])
print(port, child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def worker(tmp_path):
    """(process, port, child): a process with a lease of 1 s that has started a child. It begins anew as the worker of
    `torchtitan_rl.hosts.worker`, in whose place a script of this test stands."""
    place = tmp_path / "stand_in"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import ctypes, os, sys\nif os.environ.get('STARTED'):\n    number = ctypes.c_int()\n"
        "    ctypes.CDLL(None).prctl(2, ctypes.byref(number))\n    print('again', number.value, flush=True)\n"
        "    os._exit(7)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, "tcp://127.0.0.1:1"],
        env=os.environ | {"TORCHTITAN_RL_LEASE_S": "1", "PYTHONPATH": f"{place}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    port, child = map(int, process.stdout.readline().split())
    yield process, port, psutil.Process(child)
    for left in (*psutil.Process(process.pid).children(), process) if process.poll() is None else ():
        left.kill()
    process.communicate()


@pytest.mark.slow
def test_silence_ends_the_children_and_begins_the_worker_anew(worker):
    process, port, child = worker
    controller = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from torchtitan_rl.hosts.lease import Lease\nLease('127.0.0.1', {port}, 'tcp://127.0.0.1:7').join()",
        ],
        env=os.environ | {"TORCHTITAN_RL_LEASE_S": "1"},
    )
    time.sleep(2)  # longer than the lease: the controller keeps it
    assert child.is_running() and process.poll() is None
    controller.kill(), controller.wait()
    assert process.wait(6) == 7 and process.stdout.read() == "again 9\n"  # and still ends with its parent
    assert not child.is_running()
    assert "the controller has not been heard of for 1 s: 1 processes of its run were ended" in process.stderr.read()


@pytest.mark.slow
def test_a_worker_without_a_controller_waits_and_a_goodbye_makes_it_one(worker, monkeypatch):
    monkeypatch.setattr(lease_module, "_EVERY_S", 0.25)
    process, port, child = worker
    time.sleep(2)
    other = Lease("127.0.0.1", port, "tcp://127.0.0.1:8")
    began = time.monotonic()
    assert not other.answers(10) and time.monotonic() - began < 3  # not the worker that was meant: it is left alone
    lease = Lease("127.0.0.1", port, "tcp://127.0.0.1:7")
    assert lease.answers(3)
    lease.end()
    assert not lease.is_alive()
    time.sleep(2)
    assert child.is_running() and process.poll() is None


def test_nobody_there_does_not_answer():
    lease = Lease("127.0.0.1", 9, "tcp://127.0.0.1:7")
    assert not lease.answers(0.5)
    lease.end()

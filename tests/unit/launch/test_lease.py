"""A worker and its controller, with real sockets and processes: silence ends what was started, a goodbye does not."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from torchtitan_rl.launch.liveness import lease as lease_module
from torchtitan_rl.launch.liveness.lease import Lease, _Controller, _Worker, ask_to_attach, ask_to_leave, until_released

WORKER = """
import os, subprocess, sys, time
if os.environ.get("STARTED"):
    print("again", flush=True)
    time.sleep(60)
os.environ["STARTED"] = "1"
from torchtitan_rl.environment import end_with_parent
from torchtitan_rl.launch.liveness import lease
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
def worker(tmp_path, request):
    """(process, port, child): a process with a lease of 1 s, or of the parameter, that has started a child. It begins
    anew as the worker of `torchtitan_rl.launch.worker`, in whose place a script of this test stands."""
    place = tmp_path / "stand_in"
    place.mkdir()
    (place / "sitecustomize.py").write_text(
        "import ctypes, os, sys\nif os.environ.get('STARTED'):\n    number = ctypes.c_int()\n"
        "    ctypes.CDLL(None).prctl(2, ctypes.byref(number))\n    print('again', number.value, flush=True)\n"
        "    os._exit(7)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, "tcp://127.0.0.1:1"],
        env=os.environ
        | {
            "TORCHTITAN_RL_LEASE_S": getattr(request, "param", "1"),
            "PYTHONPATH": f"{place}:{os.environ.get('PYTHONPATH', '')}",
        },
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
    controller = controller_of(port)
    time.sleep(2)  # longer than the lease: the controller keeps it
    assert child.is_running() and process.poll() is None
    controller.kill(), controller.wait()
    assert process.wait(6) == 7 and process.stdout.read() == "again 9\n"  # and still ends with its parent
    assert not child.is_running()
    assert "the controller has not been heard of for 1 s: 1 processes of its run were ended" in process.stderr.read()


@pytest.mark.slow
def test_a_worker_without_a_controller_waits_and_a_goodbye_makes_it_one(worker, monkeypatch):
    monkeypatch.setattr(lease_module, "EVERY_S", 0.25)
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


CONTROLLER = (
    "from torchtitan_rl.launch.liveness.lease import Lease\nLease('127.0.0.1', {port}, 'tcp://127.0.0.1:7').join()"
)


def controller_of(port: int) -> subprocess.Popen:
    """A process that keeps the worker's lease, with a word every quarter of a second."""
    environment = os.environ | {"TORCHTITAN_RL_LEASE_S": "1"}
    return subprocess.Popen([sys.executable, "-c", CONTROLLER.format(port=port)], env=environment)


def patient(process: subprocess.Popen, child: psutil.Process) -> None:
    """Waits two of the worker's seconds: what it started lives on."""
    time.sleep(2)
    assert child.is_running() and process.poll() is None


@pytest.mark.parametrize("worker", ["30"], indirect=True)
def test_a_controller_that_attaches_after_a_killed_one_ends_what_that_one_left_at_once(worker):
    process, port, child = worker
    first = controller_of(port)
    patient(process, child)
    first.kill(), first.wait()
    patient(process, child)  # the lease of 30 s is not over
    start = time.monotonic()
    assert ask_to_attach("127.0.0.1", port) == ""  # begins anew
    assert process.wait(1) == 7 and time.monotonic() - start < 2
    assert not child.is_running() and process.stdout.read() == "again 9\n"
    assert "another controller attaches, and the one before is dead: 1 processes" in process.stderr.read()


@pytest.mark.parametrize("worker", ["30"], indirect=True)
def test_a_controller_that_attaches_beside_a_live_one_or_after_a_goodbye_ends_nothing(worker, monkeypatch):
    monkeypatch.setattr(lease_module, "EVERY_S", 0.25)
    process, port, child = worker
    first = controller_of(port)
    time.sleep(2)
    assert ask_to_attach("127.0.0.1", port) == "tcp://127.0.0.1:7"
    patient(process, child)
    lease = Lease("127.0.0.1", port, "tcp://127.0.0.1:7")
    assert lease.answers(5)
    lease.end()
    assert ask_to_attach("127.0.0.1", port) == "tcp://127.0.0.1:7"
    patient(process, child)
    first.kill(), first.wait()


def test_a_dead_controller_is_known_by_its_process_its_connection_or_its_silence(monkeypatch):
    own = json.loads(lease_module._identity(os.getpid()))
    elsewhere = own | {"machine": "another"}
    assert not _Controller(**own, closed=time.monotonic()).is_dead()  # this process lives, and connects again
    assert _Controller(**own | {"began": 1.0}, closed=time.monotonic()).is_dead()  # another process has the number
    assert not _Controller(**elsewhere | {"began": 1.0}, closed=time.monotonic()).is_dead()
    assert _Controller(**elsewhere, closed=time.monotonic() - lease_module.GONE_S - 1).is_dead()
    assert _Controller(**elsewhere, last_word=time.monotonic() - lease_module.QUIET_S - 1).is_dead()
    assert not _Controller(**elsewhere).is_dead()


def test_a_connection_that_ends_late_closes_no_controller_that_has_another(monkeypatch):
    """The end of the older connection is seen after the newer one has begun."""
    monkeypatch.setattr(lease_module, "GONE_S", 0.0)
    worker, own = _Worker(None, ""), json.loads(lease_module._identity(os.getpid()))
    ends, listeners = [], []
    for _ in range(2):
        end, other = socket.socketpair()
        listener = threading.Thread(target=worker._listen, args=(other, _Controller(**own)))
        listener.start()
        end.sendall(b".")
        assert end.recv(1) == b"."
        ends.append(end), listeners.append(listener)
    ends[0].close(), listeners[0].join(5)
    ends[1].sendall(b".")
    assert ends[1].recv(1) == b"." and not worker._controllers[own["name"]].is_dead()
    ends[1].close(), listeners[1].join(5)
    assert worker._controllers[own["name"]].is_dead()


@pytest.mark.parametrize("worker", ["30"], indirect=True)
def test_a_worker_that_is_to_leave_says_so_until_its_controller_lets_it_go(worker, monkeypatch):
    monkeypatch.setattr(lease_module, "EVERY_S", 0.05)
    process, port, child = worker
    seconds: list[float] = []
    lease = Lease("127.0.0.1", port, "tcp://127.0.0.1:7", seconds.append)
    assert lease.answers(5)
    answers: dict[str, bool] = {}
    waits = [
        threading.Thread(target=lambda: answers.update(waits=until_released("127.0.0.1", port))),
        threading.Thread(target=lambda: answers.update(leaves=ask_to_leave("127.0.0.1", port, 40.0))),
        threading.Thread(target=lambda: answers.update(hurries=ask_to_leave("127.0.0.1", port, 7.0))),
    ]
    for wait in waits:
        wait.start()
        time.sleep(0.5)
    assert 39 < max(seconds) <= 40 and 5 < seconds[-1] <= 7 and answers == {} and lease.answers(5)
    lease.end()
    for wait in waits:
        wait.join(5)
    assert answers == {"waits": True, "leaves": True, "hurries": True}
    assert child.is_running() and process.poll() is None


def test_who_waits_for_a_worker_that_is_not_there_learns_it():
    assert not until_released("127.0.0.1", 9) and not ask_to_leave("127.0.0.1", 9, 1.0)


def test_nobody_there_does_not_answer():
    lease = Lease("127.0.0.1", 9, "tcp://127.0.0.1:7")
    assert not lease.answers(0.5)
    lease.end()

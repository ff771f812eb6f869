"""Sandboxes of a run on several hosts, played by workers on loopback addresses; 127.0.0.1 is the controller's own."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.leftovers import nothing_left
from tests.kit.processes import gone
from torchtitan_rl.tasks.sandbox import bubblewrap

pytestmark = [
    pytest.mark.whole,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(bubblewrap.problem()), reason=f"no bubblewrap here: {bubblewrap.problem()}"),
]

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sandboxes_below(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if child.name() == "bwrap"]


class Run:
    """Workers, and the controller of tests/integration/sandbox_run.py."""

    def __init__(self, directory: Path, num_hosts: int):
        self.at = [f"127.0.0.{number}:{free_port()}" for number in range(1, num_hosts + 1)]
        self.output = directory / "output.txt"
        self.workers = [self._start("torchtitan_rl.launch.worker", f"tcp://{address}") for address in self.at]
        self.controller = self._start("tests.integration.sandbox_run", *(f"tcp://{address}" for address in self.at))
        assert self.controller.stdout.readline() == "ready\n", self.output.read_text()

    def _start(self, module: str, *arguments: str) -> psutil.Popen:
        with self.output.open("a") as output:
            return psutil.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=os.environ | {"TORCHTITAN_RL_LEASE_S": "4"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def begin(self, number: int, seconds: float) -> None:
        print(number, seconds, file=self.controller.stdin, flush=True)

    def end(self) -> tuple[dict[str, int], list]:
        """(how many sandboxes were open on each host, the results of the attempts)."""
        answer = json.loads(self.controller.stdout.readline())
        return answer["open"], answer["results"]

    def until_open(self, number: int) -> list[psutil.Process]:
        """The sandboxes of all hosts, once there are so many."""
        deadline = time.monotonic() + 60
        while True:
            below = [each for process in (*self.workers, self.controller) for each in sandboxes_below(process)]
            if len(below) >= number:
                return below
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        for process in (self.controller, *self.workers):
            for child in process.children(recursive=True) if process.is_running() else ():
                child.kill()
            process.kill()
            process.communicate()


@pytest.fixture
def run(tmp_path):
    with nothing_left():
        started = Run(tmp_path, num_hosts=3)
        yield started
        started.kill()


def test_sandboxes_run_on_every_host_a_lost_one_is_named_and_a_killed_controller_leaves_nothing(run):
    run.begin(6, 0)
    assert run.end() == ({run.at[1]: 2, run.at[2]: 2, "this host": 2}, [1.0] * 6)
    assert not [each for process in (*run.workers, run.controller) for each in sandboxes_below(process)]
    assert not run.workers[0].children()  # the controller's own host needs no actor

    run.begin(6, 10)
    below = run.until_open(6)
    run.workers[2].kill()
    open_on, results = run.end()
    assert set(open_on.values()) == {2} and results.count(1.0) == 4, results
    failures = [result for result in results if isinstance(result, str)]
    assert len(failures) == 2 and all(run.at[2] in failure for failure in failures), failures
    assert all(gone(each.pid) for each in below)
    run.begin(4, 0)
    assert run.end() == ({run.at[1]: 2, run.at[2]: 0, "this host": 2}, [1.0] * 4)

    run.begin(4, 100)
    below = run.until_open(4)
    run.controller.kill()
    assert all(gone(each.pid, within_s=20) for each in below)
    assert run.workers[1].is_running() and all(gone(child.pid) for child in run.workers[1].children())

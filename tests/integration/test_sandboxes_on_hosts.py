"""Sandboxes of a run on several hosts, played by workers on loopback addresses; 127.0.0.1 is the controller's own."""

import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.leftovers import nothing_left
from tests.kit.processes import gone
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tasks.sandbox import bubblewrap

pytestmark = [
    pytest.mark.whole,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(bubblewrap.problem()), reason=f"no bubblewrap here: {bubblewrap.problem()}"),
]

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def sandboxes_below(process: psutil.Process) -> list[psutil.Process]:
    sandboxes = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            sandboxes += [child] if child.name() == "bwrap" else []
    return sandboxes


class Run:
    """Workers on loopback addresses, and what drives them."""

    def __init__(self, directory: Path):
        self.output = directory / "output.txt"
        self.at: list[str] = []
        self.workers: list[psutil.Popen] = []

    def start_workers(self, number: int, *, lease_s: int) -> list[str]:
        """Returns their addresses. `lease_s`: seconds after which they end what a silent controller has left."""
        self.at = [f"127.0.0.{index}:{free_port()}" for index in range(1, number + 1)]
        addresses = [f"tcp://{address}" for address in self.at]
        lease = {"TORCHTITAN_RL_LEASE_S": str(lease_s)}
        self.workers = [self.start("torchtitan_rl.launch.worker", address, **lease) for address in addresses]
        return addresses

    def drive(self, module: str, *arguments: str) -> None:
        self.controller = self.start(module, *arguments)

    def start(self, module: str, *arguments: str, **environment: str) -> psutil.Popen:
        with self.output.open("a") as output:
            return psutil.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=ROOT,
                env=os.environ | environment,
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
        deadline = time.monotonic() + 120
        while True:
            below = [each for process in (*self.workers, self.controller) for each in sandboxes_below(process)]
            if len(below) >= number:
                return below
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)

    def kill(self) -> None:
        processes = [process for process in (self.controller, *self.workers) if process.is_running()]
        ended = [child for process in processes for child in process.children(recursive=True)] + processes
        for process in ended:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ended, timeout=10)
        for process in (self.controller, *self.workers):
            process.communicate()


@pytest.fixture
def run(tmp_path):
    with nothing_left():
        started = Run(tmp_path)
        yield started
        started.kill()


def test_sandboxes_run_on_every_host_a_lost_one_is_named_and_a_killed_controller_leaves_nothing(run):
    run.drive("tests.integration.sandbox_run", *run.start_workers(3, lease_s=15))
    assert run.controller.stdout.readline() == "ready\n", run.output.read_text()
    run.begin(6, 0)
    assert run.end() == ({run.at[1]: 2, run.at[2]: 2, "this host": 2}, [1.0] * 6)
    assert not [each for process in (*run.workers, run.controller) for each in sandboxes_below(process)]
    assert not run.workers[0].children()  # the controller's own host needs no actor

    run.begin(6, 15)
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
    assert all(gone(each.pid, within_s=30) for each in below)
    assert run.workers[1].is_running()
    assert all(gone(child.pid, within_s=30) for child in run.workers[1].children())


@pytest.mark.slow
def test_the_agents_of_a_run_are_in_sandboxes_on_both_of_its_hosts(run, tmp_path):
    workers = run.start_workers(2, lease_s=30)
    config, directory = str(ROOT / "tests" / "integration" / "sandboxed_agent.py"), tmp_path / "run"
    run.drive(
        "torchtitan_rl.cli", "train", config, "--hosts", ",".join(workers), "--output-dir", str(directory), "--quiet"
    )
    assert run.controller.wait(500) == 0, run.output.read_text()
    steps = [line for line in RunDir(directory).read_metrics() if line["phase"] == "reinforcement"]
    assert len(steps) == 2 and all(0 < line["reward/mean"] <= 1 for line in steps)
    assert all(0.25 <= line["reward/part_remote_mean"] <= 0.75 for line in steps), steps  # hosts of the same size
    assert not any("failure/" in name and value for line in steps for name, value in line.items())
    assert all(gone(child.pid) for worker in run.workers for child in worker.children(recursive=True))

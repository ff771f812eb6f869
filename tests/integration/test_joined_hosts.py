"""A run on one host, which two further hosts join while it trains; one leaves in order, one dies without a word.

Hosts are workers on loopback addresses. tests/integration/test_slurm.py has the same by jobs of Slurm.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts import same_bytes
from tests.integration.leftovers import nothing_left
from tests.integration.test_hosts import free_port
from tests.integration.test_resume import audited, counted
from tests.kit.forks.server import in_use
from torchtitan_rl.record.run_dir import RunDir

pytestmark = [pytest.mark.whole, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
CONFIG = """
import os, time
from configs.quickstart import config as quickstart
from torchtitan_rl.tasks.letter_sort import LetterSort

def reward(task, completions):
    time.sleep(float(os.environ["TEST_REWARD_S"]))  # it leaves time for what happens meanwhile
    return [sum(a == b for a, b in zip(text, task.answer)) / len(task.answer) for text in completions]

def config():
    config = quickstart()
    config.task = LetterSort.Config(reward=reward)
    return config
"""
ARGUMENTS = [
    *("--supervised.num-steps", "5", "--supervised.batch-size", "8"),
    *("--algorithm.tasks-per-step", "4", "--algorithm.group-size", "4", "--controller.num-steps", "1000"),
    *("--controller.eval-every", "0", "--controller.eval-tasks", "8", "--controller.test-tasks", "8"),
    *("--controller.pass-at-k", "0", "--trainer.num-threads", "1", "--generator.num-threads", "1"),
    *("--generator.num-replicas", "1"),
]


class Run:
    """A run of the command in a directory, on hosts or on this machine alone."""

    def __init__(self, config: Path, path: Path, *arguments: str, reward_s: float):
        self.path, self.output = path, path.with_suffix(".txt")
        command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(config), *ARGUMENTS, *arguments]
        with self.output.open("w") as output:
            self.process = psutil.Popen(
                [*command, "--output-dir", str(path)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TEST_REWARD_S": str(reward_s)},
            )

    def steps(self) -> int:
        metrics = self.path / "metrics.jsonl"
        lines = RunDir(self.path).read_metrics() if metrics.exists() else []
        return sum(line["phase"] == "reinforcement" for line in lines)

    def replicas(self) -> list[str]:
        return sorted(json.loads((self.path / "status.json").read_text())["replicas"])

    def until(self, condition, within_s: float = 120) -> float:
        """Waits until the condition holds; returns for how many seconds."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() < began + within_s and self.process.poll() is None, self.output.read_text()[-3000:]
            time.sleep(0.1)
        return time.monotonic() - began

    def go_on(self, steps: int) -> None:
        """Waits for so many further steps."""
        reached = self.steps() + steps
        self.until(lambda: self.steps() >= reached)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


def children_of(processes: list[psutil.Popen]) -> list[psutil.Process]:
    """The processes, and all that they have started."""
    running = [process for process in processes if process.is_running()]
    return [*running, *(child for process in running for child in process.children(recursive=True))]


@pytest.fixture
def start(tmp_path, fork_server):
    """Starts a module of the package as a process, whose output is in NAME.txt."""
    processes: list[psutil.Popen] = []

    def one(name: str, module: str, *arguments: str, **environment: str) -> psutil.Popen:
        command = [sys.executable, "-m", f"torchtitan_rl.launch.{module}", *arguments]
        with (tmp_path / f"{name}.txt").open("w") as output:
            process = psutil.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment
            )
        processes.append(process)
        return process

    with nothing_left(), in_use(fork_server):
        yield one
        left = children_of(processes)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)


def scale(run: Run, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "torchtitan_rl.cli", "scale", str(run.path), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_hosts_join_and_leave_a_run_and_one_dies_and_it_is_the_run_of_one_replica(start, tmp_path):
    config = tmp_path / "paced.py"
    config.write_text(CONFIG)
    first, second = (f"tcp://127.0.0.{number}:{free_port()}" for number in (1, 2))
    start("first", "worker", first)
    by_hand = start("second", "worker", second)
    run = Run(config, tmp_path / "run", "--hosts", first, reward_s=0.1)
    try:
        run.until(lambda: run.steps() >= 2)
        asked = scale(run, "--join", second)
        job = start("third", "join", str(run.path), TORCHTITAN_RL_HOST_ADDRESS="127.0.0.3")
        assert asked.wait(180) == 0, asked.stdout.read()
        run.until(lambda: len(run.replicas()) == 3)
        refused = scale(run, "--join", second)
        assert refused.wait(30) == 1 and f"hosts={second}: is a host of the run already" in refused.stdout.read()
        run.go_on(4)
        job.send_signal(signal.SIGTERM)
        took = time.monotonic()
        assert job.wait(40) == 0, (tmp_path / "third.txt").read_text()
        print(f"\na host had left {time.monotonic() - took:.1f} s after SIGTERM")
        run.until(lambda: len(run.replicas()) == 2, within_s=10)
        run.go_on(2)
        dead = children_of([by_hand])
        for process in dead:
            process.kill()
        print(f"the replica of a dead host was gone after {run.until(lambda: len(run.replicas()) == 1):.1f} s")
        run.go_on(2)
        assert run.stop() == 75, run.output.read_text()
    finally:
        if run.process.is_running():
            run.process.kill()
        print(run.output.read_text()[-4000:])
    audited(run.path)
    events = [(event["kind"], event["who"]) for event in RunDir(run.path).tables["events"].read()]
    kinds = [kind for kind, _ in events if "host" in kind or kind in ("replica_joined", "replica_left")]
    assert sorted(kinds[:4]) == ["host_joined", "host_joined", "replica_joined", "replica_joined"]
    assert sorted(kinds[4:]) == ["host_left", "host_lost", "replica_left", "replica_left"]
    alone = Run(config, tmp_path / "alone", reward_s=0.0)
    try:
        alone.until(lambda: alone.steps() >= run.steps(), within_s=240)
        assert alone.stop() == 75, alone.output.read_text()
    finally:
        if alone.process.is_running():
            alone.process.kill()
    number = run.steps()
    assert [*of_steps(run, number)] == [*of_steps(alone, number)]


def of_steps(run: Run, number: int) -> tuple[list[dict], list[dict]]:
    """What a run computed in its first `number` steps of reinforcement, to the last digit."""
    metrics = [line for line in counted(run.path) if line["phase"] != "'reinforcement'" or int(line["step"]) <= number]
    records = [
        {name: value for name, value in record.items() if name not in ("seconds", "turn_seconds", "attempt")}
        for record in same_bytes.rollouts(run.path)
        if int(record["step"]) <= number
    ]
    assert len(records) == number * 16
    return metrics, records

"""Runs of the quickstart on the hosts of a bed: started as a user starts them, watched by what they write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.network.bed import ROOT, Bed

__all__ = ["LAYOUTS", "SHORT", "Run", "DOORS"]

QUICKSTART = str(ROOT / "configs" / "quickstart.py")
WORKER_PORT = 26600
_ONE_THREAD = ["--trainer.num-threads", "1", "--generator.num-threads", "1"]
_OVER_TWO = ["--trainer.num-hosts", "2", "--trainer.parallelism.data-parallel-shard-degree", "2", *_ONE_THREAD]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "over-both": (2, [*_OVER_TWO, "--generator.num-replicas", "2"]),
    "one-each": (2, [*_ONE_THREAD, "--generator.num-replicas", "1"]),
    "two-and-one": (3, [*_OVER_TWO, "--generator.num-replicas", "1"]),
    "one-and-two": (3, [*_ONE_THREAD, "--generator.num-replicas", "2"]),
}
"""Name -> (hosts, arguments): FSDP over two hosts with a replica on each; trainer and generator on a host each; FSDP
over two hosts and the generator on a third; the trainer on one host and a replica on each of two others."""
SHORT = [
    *("--supervised.num-steps", "5", "--supervised.batch-size", "8"),
    *("--algorithm.tasks-per-step", "4", "--algorithm.group-size", "4", "--controller.num-steps", "20"),
    *("--controller.eval-every", "0", "--controller.eval-tasks", "8", "--controller.test-tasks", "8"),
    *("--controller.pass-at-k", "0"),
]
"""20 steps of the quickstart, small."""
_ENVIRONMENT = {"TORCHTITAN_RL_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}


class Run:
    """A run of the quickstart on all hosts of a bed, by one of two doors: `torchrun` is scripts/train_torchrun.sh on
    each host; `workers` are workers started by hand, and the command on host 0."""

    def __init__(
        self, bed: Bed, directory: Path, arguments: Sequence[str], *, door="torchrun", config=QUICKSTART, **environment
    ):
        self.bed, self.directory, self.door = bed, directory, door
        self.environment = _ENVIRONMENT | environment
        self.path = directory / "run"
        self.arguments = [config, "--output-dir", str(self.path), *arguments]
        directory.mkdir(parents=True, exist_ok=True)
        self.outputs = {host: directory / f"{host.name}.txt" for host in bed.hosts}
        self.workers: dict[int, subprocess.Popen] = {}
        self.processes: dict[int, subprocess.Popen] = {}
        """By host: what ends when the run ends."""
        DOORS[door](self)

    def _start(self, index: int, command: list[str], **environment: str) -> subprocess.Popen:
        host = self.bed.hosts[index]
        with self.outputs[host].open("a") as out:
            return host.popen(
                command,
                env=self.environment | environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def start_worker(self, index: int) -> None:
        """Starts the worker of a host by hand."""
        address = f"tcp://{self.bed.hosts[index].address}:{WORKER_PORT}"
        self.workers[index] = self._start(index, [sys.executable, "-m", "torchtitan_rl.launch.worker", address])

    def _by_torchrun(self) -> None:
        for index in range(len(self.bed.hosts)):
            self.processes[index] = self._start(
                index,
                ["bash", str(ROOT / "scripts" / "train_torchrun.sh"), *self.arguments],
                NNODES=str(len(self.bed.hosts)),
                NODE_RANK=str(index),
                MASTER_ADDR=self.bed.hosts[0].address,
            )

    def _by_workers(self) -> None:
        for index in range(len(self.bed.hosts)):
            self.start_worker(index)
        addresses = ",".join(f"tcp://{host.address}:{WORKER_PORT}" for host in self.bed.hosts)
        command = [sys.executable, "-m", "torchtitan_rl.cli", "train", *self.arguments, "--hosts", addresses]
        self.processes[0] = self._start(0, command)

    def text(self, index: int = 0) -> str:
        """What was printed on a host."""
        return self.outputs[self.bed.hosts[index]].read_text()

    def lines(self) -> list[dict]:
        """The metrics of the steps of reinforcement so far."""
        file = self.path / "metrics.jsonl"
        text = file.read_text() if file.exists() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        return [line for line in map(json.loads, whole) if line["phase"] == "reinforcement"]

    def until(self, condition: Callable[[], object], within_s: float, what: str) -> float:
        """Waits for a condition; returns the seconds it took. Raises AssertionError with the output after `within_s`
        seconds."""
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > within_s:
                raise AssertionError(f"{what}: not within {within_s:g} s\n{self.tail()}")
            time.sleep(0.1)
        return time.monotonic() - began

    def until_step(self, step: int, within_s: float = 420) -> None:
        """Waits for a step's line of metrics, while everything that was started runs."""

        def there() -> bool:
            running = all(process.poll() is None for process in self.processes.values())
            assert running or len(self.lines()) >= step, f"it ended before step {step}\n{self.tail()}"
            return len(self.lines()) >= step

        self.until(there, within_s, f"step {step}")

    def ended(self, within_s: float) -> dict[int, int]:
        """Waits until every process has ended. Returns the exit status of each host's."""
        self.until(lambda: all(p.poll() is not None for p in self.processes.values()), within_s, "the end")
        return {index: process.returncode for index, process in self.processes.items()}

    def left(self) -> list[str]:
        """What the run has left on the hosts that are on: processes, but the workers started by hand, and shared
        memory."""
        found = []
        workers = [worker.pid for worker in self.workers.values()]
        for host in self.bed.hosts:
            found += [
                f"{host.name}: process {line}" for line in host.processes() if int(line.split()[0]) not in workers
            ]
            names = sorted(os.listdir(f"/proc/{host.pid}/root/dev/shm"))
            found += [f"{host.name}: /dev/shm/{name}" for name in names]
        return found

    def nothing_left(self, within_s: float = 10) -> None:
        """Raises AssertionError naming what the run has left on its hosts after `within_s` seconds."""
        end = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.2)
        assert left == [], "\n".join(left)

    def tail(self) -> str:
        """The last lines of each host's output, for errors."""
        return "\n".join(f"--- {host.name}\n{output.read_text()[-3000:]}" for host, output in self.outputs.items())


DOORS: dict[str, Callable[[Run], None]] = {"torchrun": Run._by_torchrun, "workers": Run._by_workers}

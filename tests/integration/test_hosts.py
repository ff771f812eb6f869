"""Two hosts by torchrun on two loopback addresses: a mesh over both trains, a host that dies is named."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.integration.leftovers import nothing_left
from tests.kit.forks.server import in_use
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.weights import checkpoint

pytestmark = [pytest.mark.whole, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SCRIPT = ["bash", str(ROOT / "scripts" / "train_torchrun.sh")]
QUICKSTART = str(ROOT / "configs" / "quickstart.py")
SHORT = [
    "--supervised.num-steps",
    "2",
    "--supervised.batch-size",
    "8",
    "--algorithm.tasks-per-step",
    "4",
    "--algorithm.group-size",
    "4",
    "--controller.num-steps",
    "2",
    "--controller.eval-every",
    "0",
    "--controller.eval-tasks",
    "8",
    "--controller.test-tasks",
    "8",
    "--controller.pass-at-k",
    "0",
    "--trainer.num-hosts",
    "2",
    "--trainer.parallelism.data-parallel-shard-degree",
    "2",
    "--trainer.num-threads",
    "1",
    "--generator.num-replicas",
    "2",
    "--generator.num-threads",
    "1",
]
ADDRESSES = ["127.0.0.1", "127.0.0.2"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def holding(directory: Path, name: str) -> set[int]:
    """The processes that write a file below a directory, as those of a run do, and hold a segment of shared memory of
    this name."""
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        opened = []
        for fd in process.glob("fd/*"):
            with suppress(OSError):  # closed since, or the process has ended
                opened.append(os.readlink(fd))
        if any(path.startswith(str(directory)) for path in opened) and any(name in path for path in opened):
            pids.add(int(process.name))
    return pids


class Launch:
    """The script, started once per host; `arguments` may differ only in what a test gets wrong on purpose."""

    def __init__(self, directory: Path, *arguments: str, ranks=(0, 1), num_nodes: int = 2, **environment: str):
        self.directory, port = directory, free_port()
        self.outputs = [directory / f"host-{rank}.txt" for rank in ranks]
        self.processes = [
            subprocess.Popen(
                [*SCRIPT, QUICKSTART, *SHORT, "--output-dir", str(directory / "run"), *arguments],
                cwd=ROOT,
                stdout=output.open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {
                    "TORCHTITAN_RL_PYTHON": sys.executable,
                    "NNODES": str(num_nodes),
                    "NODE_RANK": str(rank),
                    "MASTER_PORT": str(port),
                    "TORCHTITAN_RL_HOST_ADDRESS": ADDRESSES[rank],
                    **environment,
                },
            )
            for rank, output in zip(ranks, self.outputs, strict=True)
        ]

    def wait(self, timeout: float) -> list[int]:
        end = time.monotonic() + timeout
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]

    def wait_for_metrics(self, timeout: float = 240) -> None:
        metrics, end = self.directory / "run" / "metrics.jsonl", time.monotonic() + timeout
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < end and all(p.poll() is None for p in self.processes), self.text()
            time.sleep(0.1)

    def descendants(self) -> list[psutil.Process]:
        return [child for p in self.processes for child in psutil.Process(p.pid).children(recursive=True)]

    def text(self, host: int | None = None) -> str:
        outputs = self.outputs if host is None else [self.outputs[host]]
        return "\n".join(output.read_text() for output in outputs)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()  # what it started ends with it
                process.wait()


@pytest.fixture
def launch(tmp_path):
    launches = []

    def start(*arguments, **options) -> Launch:
        launches.append(Launch(tmp_path, *arguments, **options))
        return launches[-1]

    with nothing_left():
        yield start
        for one in launches:
            one.kill()


def test_a_trainer_over_two_hosts_trains_and_everything_ends(launch, tmp_path, fork_server):
    with in_use(fork_server):
        run = launch()
    run.wait_for_metrics()
    processes = run.descendants()
    # Between hosts every trainer rank keeps its own shard, and every generator what it has fetched.
    publishers, fetchers = holding(tmp_path, "torchtitan_rl_weights"), holding(tmp_path, "torchtitan_rl_staging")
    assert len(publishers) == len(fetchers) == 2 and not publishers & fetchers
    assert run.wait(240) == [0, 0], run.text()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive
    assert "greedy accuracy after reinforcement" in run.text(0)
    assert all(
        (tmp_path / "run" / "logs" / name).exists()
        for name in ("policy-0.log", "policy-1.log", "generator-0-0.log", "generator-1-0.log")
    )
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["phase"] == "reinforcement"]
    assert len(steps) == 2 and all(line["mismatch/kl"] <= 1e-6 for line in steps)


@pytest.mark.parametrize(
    "victim, named",
    [
        pytest.param("worker", r"error: .*host 127\.0\.0\.2:\d+", marks=pytest.mark.slow),
        pytest.param("everything", r"error: .*host 127\.0\.0\.2:\d+", marks=pytest.mark.slow),
        pytest.param("controller", r"error: the controller was ended by signal 9", marks=pytest.mark.slow),
        pytest.param("rank", r"error: policy-1\.\w+ on 127\.0\.0\.2:\d+: its process died", marks=pytest.mark.slow),
    ],
    ids=["worker", "everything", "controller", "rank"],
)
def test_what_dies_is_named_with_its_host_within_fifteen_seconds(launch, tmp_path, victim, named):
    run = launch("--supervised.num-steps", "5000", "--generator.num-replicas", "1")
    run.wait_for_metrics()
    processes = run.descendants()
    (worker,) = [
        p for p in processes if "torchtitan_rl.launch.worker" in p.cmdline() and ADDRESSES[1] in p.cmdline()[-1]
    ]
    start = time.monotonic()
    if victim == "worker":
        worker.kill()
    elif victim == "controller":
        os.kill(attempts.attempts(RunDir(tmp_path / "run"))[-1]["pid"], signal.SIGKILL)
    elif victim == "rank":
        first_line = (tmp_path / "run" / "logs" / "policy-1.log").read_text().splitlines()[0]
        os.kill(int(re.search(r"pid (\d+)", first_line)[1]), signal.SIGKILL)
    else:  # as if the machine had gone: torchrun and all that it started
        for process in psutil.Process(run.processes[1].pid).children(recursive=True):
            process.send_signal(signal.SIGKILL)
        run.processes[1].kill()
    while not re.search(named, run.text(0)) and time.monotonic() - start < 15:
        time.sleep(0.1)
    assert re.search(named, run.text(0)), run.text()
    assert all(status != 0 for status in run.wait(60)), run.text()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize("host", [0, 1])
def test_sigterm_on_one_host_writes_a_checkpoint_and_ends_both(launch, tmp_path, host):
    run = launch("--supervised.num-steps", "5000", "--generator.num-replicas", "1")
    run.wait_for_metrics()
    processes = run.descendants()
    (door,) = [
        p for p in psutil.Process(run.processes[host].pid).children() if "torchtitan_rl.launch.torchrun" in p.cmdline()
    ]
    for _ in range(2):  # as Slurm does when it preempts
        door.send_signal(signal.SIGTERM)
    assert run.wait(60) == [1, 1], run.text()  # torchrun's own status for a process that ended with another than 0
    steps = sum(line["phase"] == "supervised" for line in RunDir(tmp_path / "run").read_metrics())
    assert f"stopped in the supervised phase at step {steps} with a checkpoint: SIGTERM" in run.text(0), run.text()
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").name == f"supervised-{steps}"
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not alive


@pytest.fixture
def workers(tmp_path, fork_server):
    """(processes, addresses): a worker on each of two loopback addresses, as they are started by hand."""
    at = [f"tcp://{address}:{free_port()}" for address in ADDRESSES]
    command = [sys.executable, "-m", "torchtitan_rl.launch.worker"]
    with nothing_left(), in_use(fork_server), (tmp_path / "workers.txt").open("w") as output:
        processes = [
            psutil.Popen([*command, address], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) for address in at
        ]
        yield processes, at
        for process in processes:
            for child in (*process.children(recursive=True), process):
                child.kill()
        psutil.wait_procs(processes, timeout=10)


def attached_run(directory: Path, name: str, at: list[str], *arguments: str) -> psutil.Popen:
    """A run on workers. Its output is in NAME.txt."""
    command = [sys.executable, "-m", "torchtitan_rl.cli", "train", QUICKSTART, *SHORT, "--hosts", ",".join(at)]
    command += ["--output-dir", str(directory / name), *arguments]
    with (directory / f"{name}.txt").open("w") as output:
        return psutil.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


def test_a_controller_that_attaches_after_a_killed_one_ends_at_once_what_it_left(workers, tmp_path):
    processes, at = workers
    first = attached_run(tmp_path, "first", at, "--supervised.num-steps", "5000")
    try:
        metrics, end = tmp_path / "first" / "metrics.jsonl", time.monotonic() + 240
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < end and first.poll() is None, (tmp_path / "first.txt").read_text()
            time.sleep(0.1)
        left = [child for process in processes for child in process.children(recursive=True)]
        assert len(left) >= 5  # two trainer ranks, two generators, the store
    finally:
        first.kill(), first.wait()
    second, killed = attached_run(tmp_path, "second", at), time.monotonic()
    try:
        _, alive = psutil.wait_procs(left, timeout=25)  # the lease of a silent controller is 30 s
        assert not alive, alive
        print(f"the processes of the dead controller had ended {time.monotonic() - killed:.1f} s after its death")
        assert second.wait(240) == 0, (tmp_path / "second.txt").read_text()
    finally:
        with suppress(psutil.NoSuchProcess):
            second.kill()
    output = (tmp_path / "workers.txt").read_text()
    assert output.count("another controller attaches, and the one before is dead") == 2, output


def test_a_host_that_does_not_come_ends_the_wait(launch):
    run = launch(ranks=(0,), TORCHTITAN_RL_JOIN_S="4")
    assert run.wait(120) != [0]
    assert "1/2 clients joined" in run.text(), run.text()  # torchrun's own words


def test_more_hosts_than_the_launch_has_are_refused_with_the_numbers(launch):
    run = launch("--trainer.num-hosts", "3", ranks=(0,), num_nodes=1)
    assert run.wait(120) == [1]
    assert "error: trainer.num_hosts=3 (policy): the launch has 1 host (this host)" in run.text()


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--trainer.num-hosts", "2"], "trainer.num_hosts=2 (policy): the launch has 1 host (this host)"),
        (
            ["--trainer.num-hosts", "2", "--hosts", "tcp://10.0.0.1:1,tcp://10.0.0.2:1"],
            "trainer.num_hosts=2 (policy): does not divide the mesh's 1 ranks",
        ),
        (["--generator.num-replicas", "1000"], "generator ranks on this host, whose"),
        (["--trainer.num-threads", "1000"], "trainer.num_threads=1000: this host has"),
    ],
)
def test_a_dry_run_refuses_what_does_not_fit(here, arguments, expected):
    result = here("train", QUICKSTART, "--dry-run", *arguments)
    assert result.returncode == 1 and expected in result.stderr, result.stderr


@pytest.mark.parametrize(
    "hosts, expected",
    [
        ("10.0.0.1:5", "hosts='10.0.0.1:5': is not the address of a worker"),
        ("tcp://127.0.0.1:1,tcp://127.0.0.1:1", "a worker is named twice"),
    ],
)
def test_addresses_of_another_form_are_refused(here, hosts, expected):
    result = here("train", QUICKSTART, "--hosts", hosts)
    assert result.returncode == 1 and expected in result.stderr, result.stderr


def test_a_slurm_job_is_printed_and_not_submitted(tmp_path):
    result = subprocess.run(
        [
            "bash",
            str(ROOT / "scripts" / "train_job.sh"),
            "slurm",
            QUICKSTART,
            "--num-hosts",
            "2",
            "--gpus-per-host",
            "4",
            "--time-limit",
            "01:00:00",
            "--requeue",
            "--output-dir",
            "runs/job",
            "--dry-run",
            "--trainer.num-hosts",
            "2",
            "--trainer.parallelism.data-parallel-shard-degree",
            "2",
        ],
        cwd=tmp_path,
        env=os.environ | {"TORCHTITAN_RL_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    for line in ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4", "#SBATCH --time=01:00:00", "#SBATCH --requeue"):
        assert line in result.stdout.splitlines()
    assert f"torchtitan_rl.launch.torchrun {QUICKSTART} --output-dir runs/job --trainer.num-hosts 2" in result.stdout
    assert result.stderr == "" and list(tmp_path.iterdir()) == []

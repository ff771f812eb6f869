"""A run as a job of a real Slurm, of two nodes on this machine: to its end, queued again, out of time, cancelled; and a
second job that joins it.

Both nodes share the machine's cores and network, see `tests.slurm.bed`.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import same_bytes
from tests.integration.conftest import SHORT
from tests.integration.leftovers import nothing_left
from tests.integration.test_resume import audited, counted
from tests.slurm.bed import Cluster, missing
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.weights import checkpoint

pytestmark = [
    pytest.mark.whole,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=f"needs a Slurm of its own: {missing()}"),
]

ROOT = Path(__file__).parents[2]
FLAGS = {
    "supervised.num-steps": 20,
    "supervised.batch-size": 16,
    "algorithm.tasks-per-step": 4,
    "controller.num-steps": 20,
    "controller.checkpoint-every": 5,
    "controller.eval-every": 10,
    "controller.eval-tasks": 16,
    "controller.test-tasks": 16,
    "controller.pass-at-k": 2,
    "trainer.num-hosts": 2,
    "trainer.parallelism.data-parallel-shard-degree": 2,
    "trainer.num-threads": 1,
    "generator.num-replicas": 2,
    "generator.num-threads": 1,
}
ENDLESS = ("--supervised.num-steps", "100000")
_SERVES_S = 600
"""Within which a replica serves, or steps are taken, also on a machine that others use."""


@pytest.fixture(scope="module")
def cluster():
    with nothing_left(), Cluster(2) as cluster:
        yield cluster
        assert cluster.steps() == []


def submit(cluster: Cluster, path: Path, *more: str) -> str:
    """Submits the run of `FLAGS` as a job; returns the job's number."""
    flags = [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    config = "configs/quickstart.py"
    done = train_job(cluster, "slurm", config, "--num-hosts", "2", *flags, "--output-dir", str(path), *more)
    assert done.returncode == 0, done.stderr
    return re.match(r"job (\d+): submitted", done.stdout)[1]


def train_job(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess:
    """What the script that submits jobs answers."""
    return subprocess.run(
        ["bash", "scripts/train_job.sh", *arguments],
        cwd=ROOT,
        env=cluster.environment | {"TORCHTITAN_RL_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )


def until(condition: Callable[[], bool], output: Path, within_s: float = 240) -> float:
    """Waits until the condition holds; returns for how many seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + within_s, output.read_text() if output.exists() else "no output"
        time.sleep(0.1)
    return time.monotonic() - start


def in_state(cluster: Cluster, job: str, *states: str) -> Callable[[], bool]:
    return lambda: cluster.job(job)["JobState"] in states


def to_the_end(cluster: Cluster, job: str, path: Path) -> None:
    output = path / f"slurm-{job}.txt"
    until(in_state(cluster, job, "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL"), output)
    assert cluster.job(job)["JobState"] == "COMPLETED", output.read_text()


def lines(path: Path, phase: str = "supervised") -> int:
    file = path / "metrics.jsonl"
    return sum(line["phase"] == phase for line in RunDir(path).read_metrics()) if file.exists() else 0


def computed(path: Path) -> tuple[list[dict], list[dict]]:
    """What a run computed, to the last digit: metrics, and all records of rollouts but times and attempts."""
    records = [
        {name: value for name, value in record.items() if name not in ("seconds", "turn_seconds", "attempt")}
        for record in same_bytes.rollouts(path)
    ]
    return counted(path), records


def assert_same(path: Path, undisturbed: Path, num_attempts: int) -> None:
    (metrics, records), (expected, expected_records) = computed(path), computed(undisturbed)
    assert len(expected) > 40 and len(expected_records) == 20 * 4 * 8
    assert metrics == expected and records == expected_records
    weights = "checkpoints/step-20/hf/model.safetensors"
    assert (path / weights).read_bytes() == (undisturbed / weights).read_bytes()
    assert audited(path)["attempts"] == num_attempts


def went_on_at(path: Path) -> str:
    return attempts.attempts(RunDir(path))[-1]["resumed_from"]


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("slurm") / "undisturbed"
    job = submit(cluster, path)
    to_the_end(cluster, job, path)
    assert audited(path)["attempts"] == 1
    return path


@pytest.mark.parametrize("phase", ["supervised", "reinforcement"])
def test_a_run_that_is_queued_again_is_the_undisturbed_run(cluster, undisturbed, tmp_path, phase):
    path = tmp_path / "run"
    job = submit(cluster, path)
    until(lambda: lines(path, phase) >= 7, path / f"slurm-{job}.txt")
    cluster.run("scontrol", "requeue", job)
    waited = until(in_state(cluster, job, "PENDING"), path / f"slurm-{job}.txt", within_s=60)
    made = lines(path, phase)
    assert 7 <= made < 20, "the run ended before the request"
    assert checkpoint.latest(path / "checkpoints").name.endswith(f"-{made}"), "nothing was lost"
    print(f"\nscontrol requeue after step {made} ({phase}): a checkpoint, and everything ended, in {waited:.1f} s")
    assert cluster.steps() == []
    cluster.start_now(job)
    to_the_end(cluster, job, path)
    assert cluster.job(job)["Restarts"] == "1"
    assert went_on_at(path) == f"{'supervised' if phase == 'supervised' else 'step'}-{made}"
    assert_same(path, undisturbed, num_attempts=2)


def test_a_job_of_higher_priority_takes_the_nodes_and_the_run_goes_on_after_it(cluster, undisturbed, tmp_path):
    path = tmp_path / "run"
    job = submit(cluster, path)
    until(lambda: lines(path, "reinforcement") >= 4, path / f"slurm-{job}.txt")
    urgent = cluster.run("sbatch", "--parsable", "-p", "high", "-N2", "-o", "/dev/null", "--wrap", "sleep 2")
    waited = until(in_state(cluster, urgent, "RUNNING", "COMPLETED"), path / f"slurm-{job}.txt", within_s=60)
    print(f"\na job of higher priority had the nodes after {waited:.1f} s")
    assert "DUE TO PREEMPTION" in (path / f"slurm-{job}.txt").read_text()
    until(in_state(cluster, urgent, "COMPLETED"), path / f"slurm-{job}.txt", within_s=30)
    cluster.start_now(job)
    to_the_end(cluster, job, path)
    assert_same(path, undisturbed, num_attempts=2)


def test_a_run_that_loses_a_process_is_queued_again_as_often_as_was_allowed(cluster, undisturbed, tmp_path):
    path = tmp_path / "run"
    job = submit(cluster, path, "--max-restarts", "1")
    until(lambda: lines(path, "reinforcement") >= 7, path / f"slurm-{job}.txt")
    first_line = (path / "logs" / "policy-1.log").read_text().splitlines()[0]
    os.kill(int(re.search(r"pid (\d+)", first_line)[1]), 9)
    until(in_state(cluster, job, "PENDING"), path / f"slurm-{job}.txt", within_s=90)
    assert checkpoint.latest(path / "checkpoints").name in ("step-5", "step-10")
    cluster.start_now(job)
    to_the_end(cluster, job, path)
    assert_same(path, undisturbed, num_attempts=2)


def test_a_run_writes_a_checkpoint_before_its_time_is_up_and_waits_for_more(cluster, tmp_path):
    path = tmp_path / "run"
    job = submit(cluster, path, *ENDLESS, "--time-limit", "00:02:00", "--stop-before", "30")
    output = path / f"slurm-{job}.txt"
    until(in_state(cluster, job, "RUNNING"), output)
    waited = until(in_state(cluster, job, "PENDING", "FAILED", "TIMEOUT"), output, within_s=180)
    assert cluster.job(job)["JobState"] == "PENDING", output.read_text()
    made = lines(path)
    print(f"\nof a limit of 120 s the run used {waited:.1f} s, {made} steps")
    assert 20 < waited < 120 and checkpoint.latest(path / "checkpoints").name == f"supervised-{made}"
    cluster.start_now(job)
    until(lambda: lines(path) > made, output)
    assert went_on_at(path) == f"supervised-{made}"
    cluster.run("scancel", job)
    until(in_state(cluster, job, "CANCELLED"), output, within_s=60)


def cancelled(cluster: Cluster, path: Path) -> None:
    """Submits a run, which goes on where `path` has one, and cancels it after some steps."""
    job, before = submit(cluster, path, *ENDLESS), lines(path)
    until(lambda: lines(path) > before + 2, path / f"slurm-{job}.txt")
    assert len(cluster.steps()) > 8
    cluster.run("scancel", job)
    waited = until(lambda: cluster.steps() == [], path / f"slurm-{job}.txt", within_s=60)
    until(in_state(cluster, job, "CANCELLED"), path / f"slurm-{job}.txt", within_s=30)
    print(f"\nscancel: nothing was left after {waited:.1f} s")


def test_scancel_leaves_nothing(cluster, tmp_path):
    path = tmp_path / "run"
    with nothing_left():
        for _ in range(2):
            cancelled(cluster, path)
    assert checkpoint.latest(path / "checkpoints").name == f"supervised-{lines(path)}", "and it can go on"


def test_a_job_that_slurm_refuses_says_so(cluster, tmp_path):
    arguments = ["configs/quickstart.py", "--output-dir", str(tmp_path / "run"), "--partition", "nowhere"]
    done = train_job(cluster, "slurm", *arguments)
    assert done.returncode == 1 and "error: sbatch: the job was not accepted" in done.stderr
    assert "invalid partition specified: nowhere" in done.stderr


@pytest.mark.timeout(1800)
def test_a_second_job_joins_is_preempted_joins_again_and_leaves_before_its_time_is_up(cluster, tmp_path):
    path = tmp_path / "run"
    single = {"--trainer.num-hosts": 1, "--trainer.parallelism.data-parallel-shard-degree": 1}
    single |= {"--generator.num-replicas": 1, "--controller.num-steps": 100_000, "--controller.eval-every": 0}
    single |= {"--algorithm.group-size": 4, "--supervised.num-steps": 2}
    flags = [text for name, value in single.items() for text in (name, str(value))]
    job = submit(cluster, path, "--num-hosts", "1", *flags)
    output = path / f"slurm-{job}.txt"
    until(lambda: lines(path, "reinforcement") >= 2, output, _SERVES_S)

    def replicas() -> int:
        return len(json.loads((path / "status.json").read_text())["replicas"])

    def goes_on(steps: int = 2) -> None:
        reached = lines(path, "reinforcement") + steps
        until(lambda: lines(path, "reinforcement") >= reached, output, _SERVES_S)

    submitted = train_job(cluster, "slurm-join", str(path), "--num-hosts", "1", "--time-limit", "01:00:00")
    assert submitted.returncode == 0, submitted.stderr
    hosts = re.match(r"job (\d+): submitted", submitted.stdout)[1]
    theirs = path / f"slurm-{hosts}.txt"
    print(f"\na host of a second job served after {until(lambda: replicas() == 2, theirs, within_s=_SERVES_S):.1f} s")
    goes_on()
    node = cluster.job(hosts)["NodeList"]
    urgent = cluster.run("sbatch", "--parsable", "-p", "high", "-w", node, "-o", "/dev/null", "--wrap", "sleep 2")
    waited = until(in_state(cluster, urgent, "RUNNING", "COMPLETED"), theirs, within_s=120)
    print(f"a job of higher priority had the node after {waited:.1f} s")
    until(lambda: "has left" in theirs.read_text(), theirs, within_s=30)
    assert "leaves within 12 s" in theirs.read_text()
    until(lambda: replicas() == 1, output, within_s=120)
    goes_on()
    until(in_state(cluster, urgent, "COMPLETED"), theirs, within_s=120)
    cluster.start_now(hosts)
    until(lambda: replicas() == 2, theirs, within_s=_SERVES_S)
    goes_on()
    cluster.run("scancel", "--batch", "--signal=USR1", hosts)  # as Slurm does before the time limit
    until(in_state(cluster, hosts, "COMPLETED", "FAILED"), theirs, within_s=120)
    assert cluster.job(hosts)["JobState"] == "COMPLETED", theirs.read_text()
    until(lambda: replicas() == 1, output, within_s=120)
    goes_on()
    cluster.run("scancel", job)
    until(in_state(cluster, job, "CANCELLED"), output, within_s=120)
    audited(path)
    kinds = [event["kind"] for event in RunDir(path).tables["events"].read()]
    assert kinds.count("host_joined") == kinds.count("host_left") == 2
    assert "host_lost" not in kinds and "replica_lost" not in kinds


def test_a_sweep_is_an_array_whose_jobs_end_with_the_table_of_one_process(cluster, tmp_path):
    array, alone = tmp_path / "array", tmp_path / "alone"
    sweep = [sys.executable, "-m", "torchtitan_rl.cli", "sweep", "configs/quickstart.py", *SHORT]
    sweep += ["--backend", "local", "--controller.num-steps", "6", "--controller.checkpoint-every", "1"]
    sweep += ["--controller.keep-last", "-1", "--set", "trainer.optimizer.lr=0.001,0.05", "--seeds", "0,3,5"]

    def run(*more: str) -> str:
        done = subprocess.run(
            [*sweep, *more], cwd=ROOT, env=cluster.environment, capture_output=True, text=True, timeout=800
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    job = re.match(r"job (\d+): submitted, 3 jobs", run("--output-dir", str(array), "--slurm"))[1]
    outputs = {task: array / f"slurm-{job}_{task}.txt" for task in range(3)}
    until((array / "seed-3" / "parent" / "checkpoints" / "step-2" / "COMPLETE").exists, outputs[1])
    cluster.run("scontrol", "requeue", f"{job}_1")  # its run writes a checkpoint
    until(lambda: cluster.job(f"{job}_1")["Restarts"] == "1" and in_state(cluster, f"{job}_1", "PENDING")(), outputs[1])
    cluster.start_now(f"{job}_1")
    for task, output in outputs.items():
        until(in_state(cluster, f"{job}_{task}", "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED"), output)
        assert cluster.job(f"{job}_{task}")["JobState"] == "COMPLETED", output.read_text()
    table = run("--output-dir", str(alone))
    assert (array / "table.md").read_text() == (alone / "table.md").read_text() == table[table.index("| arm") :]
    for seed in (0, 3, 5):
        for arm in ("parent", "trainer.optimizer.lr=0.05"):
            assert computed(array / f"seed-{seed}" / arm) == computed(alone / f"seed-{seed}" / arm)
            assert audited(array / f"seed-{seed}" / arm)
    assert went_on_at(array / "seed-3" / "parent") and "3 seeds" in outputs[1].read_text()

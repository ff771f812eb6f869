"""Forks: a run goes on from another run's checkpoint, and differs from it by what was changed and by nothing else."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.leftovers import nothing_left
from tests.integration.test_resume import audited, config, counted, rollouts, run
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record import attempts
from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.record.fork_point import fork_point
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.verify import differences_of, environments, problems_of
from torchtitan_rl.train.fork import make_fork, plan_fork
from torchtitan_rl.train.run_record import read_record
from torchtitan_rl.weights.checkpoint import latest


@pytest.fixture(scope="module")
def parent(loop, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("parent") / "run"
    loop.run_until_complete(run(config(path, supervised__num_steps=1, controller__eval_every=1)))
    return path


def forked(loop, parent: Path, path: Path, *settings: str, at: int = 2, **arguments) -> Path:
    made, point = plan_fork(parent, at, list(settings), output_dir=str(path), **arguments)
    make_fork(made, point)
    loop.run_until_complete(run(made, resume_from="latest"))
    return path


def files(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def weights(path: Path) -> bytes:
    return (path / "checkpoints" / "step-4" / "hf" / "model.safetensors").read_bytes()


@pytest.mark.whole
def test_forks_without_a_change_are_their_parent_and_one_change_is_one_difference(parent, loop, tmp_path):
    before = files(parent)
    same = forked(loop, parent, tmp_path / "same")
    assert counted(same) == counted(parent) and rollouts(same) == rollouts(parent)
    assert weights(same) == weights(parent)
    counts, expected_counts = audited(same), audited(parent)
    assert (counts.pop("attempts"), expected_counts.pop("attempts")) == (2, 1) and counts == expected_counts
    records = [read_record(path) for path in (parent, same)]
    of_parent, of_fork = (record.digests for record in records)
    assert of_fork.items() <= of_parent.items()  # a fork has no checkpoint from before its point
    assert of_fork.keys() >= {"config", "draws", "metrics", "checkpoints/step-2", "checkpoints/step-4"}
    assert [len(record.environments) for record in records] == [1, 1]
    runs = Run.open(parent), Run.open(same)
    assert [problems_of(run) for run in runs] == [[], []] and differences_of(*runs) == environments(*runs) == []
    other = forked(loop, parent, tmp_path / "other", "algorithm.loss_config.clip_high=0.01", "trainer.optimizer.lr=0.1")
    assert files(parent) == before
    lines, expected = ([line for line in counted(path) if "optim/lr" in line] for path in (other, parent))
    assert [line == same_line for line, same_line in zip(lines, expected)] == [True, True, True, False, False]
    assert weights(other) != weights(parent)
    # The first batch after the fork point was sampled by the same weights with the same noise.
    assert [r for r in rollouts(other) if r[0] <= 3] == [r for r in rollouts(parent) if r[0] <= 3]
    audited(other)
    differences = differences_of(Run.open(parent), Run.open(other))
    assert [text.split(":")[0] for text in differences] == ["config", "first batch that differs", "checkpoints/step-3"]
    assert differences[1].startswith("first batch that differs: step 3: ")
    point = fork_point(other)
    assert (point.parent, point.step, point.checkpoint) == (str(parent), 2, "step-2")
    assert point.changes["trainer.optimizer.lr"][1] == 0.1 and not point.new_draws
    # The fork goes on from a copy: another resume of it must have the changes too.
    with pytest.raises(ValueError, match="algorithm.loss_config.clip_high"):
        shutil.copytree(other, tmp_path / "cut")
        for name in ("step-3", "step-4"):
            shutil.rmtree(tmp_path / "cut" / "checkpoints" / name)
        loop.run_until_complete(run(config(tmp_path / "cut", supervised__num_steps=1), resume_from="auto"))


@pytest.mark.whole
def test_new_draws_begin_where_the_parent_stood(parent, loop, tmp_path):
    path = forked(loop, parent, tmp_path / "run", "seed=1", new_draws=True)
    audited(path)
    tasks = [{r["task_id"] for r in read_rollouts(RunDir(run)) if r["step"] == 3} for run in (path, parent)]
    assert tasks[0] and not tasks[0] & tasks[1]
    assert [r for r in rollouts(path) if r[0] <= 2] == [r for r in rollouts(parent) if r[0] <= 2]


@pytest.mark.whole
@pytest.mark.usefixtures("forked")
def test_a_fork_under_a_supervisor_begins_again_after_a_kill(parent, tmp_path):
    path = tmp_path / "run"
    words = ["fork", str(parent), "--at", "2", "--set", "trainer.optimizer.lr=0.1", "--backend", "local"]
    words += ["--output-dir", str(path), "--max-restarts", "1"]
    with nothing_left():
        command = [sys.executable, "-m", "torchtitan_rl.cli", *words]
        supervisor = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 250
        while latest(path / "checkpoints") != path / "checkpoints" / "step-3":
            assert supervisor.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(attempts.attempts(RunDir(path))[-1]["pid"], signal.SIGKILL)
        _, stderr = supervisor.communicate(timeout=250)
    assert supervisor.returncode == 0, stderr
    assert "warning: an attempt was ended by signal 9; restart 1 of 1 begins" in stderr
    assert [a["step"] for a in attempts.attempts(RunDir(path))][1:] == [2, 3]
    audited(path)
    assert fork_point(path).changes["trainer.optimizer.lr"][1] == 0.1

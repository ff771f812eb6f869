"""A sweep by the command: killed twice and started again, it is the sweep that nobody killed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.conftest import SHORT
from tests.integration.leftovers import nothing_left
from tests.integration.test_resume import audited, counted, rollouts
from torchtitan_rl.record import attempts
from torchtitan_rl.record.fork_point import fork_point
from torchtitan_rl.record.run_dir import RunDir

ROOT = Path(__file__).parents[2]
FORK = "trainer.optimizer.lr=0.05"
ARGUMENTS = [
    *("sweep", str(ROOT / "configs" / "quickstart.py"), *SHORT, "--backend", "local"),
    *("--controller.num-steps", "3", "--controller.checkpoint-every", "1", "--controller.keep-last", "-1"),
    *("--set", "trainer.optimizer.lr=0.001,0.05", "--seeds", "0,1"),
]


def started(directory: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "torchtitan_rl.cli", *ARGUMENTS, "--output-dir", str(directory)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def start_and_kill(directory: Path, saved: Path) -> None:
    """Kills the sweep once the file is there."""
    process, deadline = started(directory), time.monotonic() + 900
    try:
        while not saved.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()


def printed_table(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    return out[out.index("| arm") :]


@pytest.mark.whole
@pytest.mark.usefixtures("forked")
@pytest.mark.timeout(3000)
def test_a_sweep_that_was_killed_twice_goes_on_to_the_same_table_and_trains_nothing_twice(tmp_path):
    with nothing_left():
        table = printed_table(started(tmp_path / "whole"))
        for killed_in in (Path("seed-0", FORK), Path("seed-1", "parent")):
            start_and_kill(tmp_path / "killed", tmp_path / "killed" / killed_in / "checkpoints" / "step-1" / "COMPLETE")
        after_one_seed = (tmp_path / "killed" / "table.md").read_text()
        assert after_one_seed != table
        assert printed_table(started(tmp_path / "killed")) == table
    assert (tmp_path / "killed" / "table.md").read_text() == table == (tmp_path / "whole" / "table.md").read_text()
    for seed in ("seed-0", "seed-1"):
        # The base arm is the parent: it has no run beside it.
        assert {path.name for path in (tmp_path / "whole" / seed).iterdir() if path.is_dir()} == {"parent", FORK}
        for arm in ("parent", FORK):
            runs = [tmp_path / sweep / seed / arm for sweep in ("whole", "killed")]
            assert counted(runs[0]) == counted(runs[1]) and rollouts(runs[0]) == rollouts(runs[1])
            audited(runs[1])
        parent, fork = (tmp_path / "whole" / seed / arm for arm in ("parent", FORK))
        begun = [[(a["phase"], a["step"]) for a in attempts.attempts(RunDir(path))] for path in (parent, fork)]
        assert begun == [[("", 0)], [("", 0), ("reinforcement", 0)]]  # the warm start is the parent's
        point = fork_point(fork)
        assert (point.parent, point.step) == (str(parent), 0)
        assert [*point.changes] == ["trainer.optimizer.lr"]
        # The first batch is sampled by the same weights with the same noise; its step has another learning rate.
        first = [[r for r in rollouts(path) if r[0] == 1] for path in (parent, fork)]
        assert first[0] == first[1] and rollouts(parent) != rollouts(fork)
    begun = {
        (seed, arm): len(attempts.attempts(RunDir(tmp_path / "killed" / f"seed-{seed}" / arm)))
        for seed in (0, 1)
        for arm in ("parent", FORK)
    }
    # A fork's attempts begin with those of its parent.
    assert begun == {(0, "parent"): 1, (0, FORK): 1 + 2, (1, "parent"): 2, (1, FORK): 2 + 1}

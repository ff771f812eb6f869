"""What the quickstart promises, by the command a user types. Slow: about four minutes a run
(`scripts/acceptance.sh`)."""

import json
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SCRIPT = ["bash", str(ROOT / "scripts" / "quickstart.sh")]


def lines(path: Path, phase: str) -> list[dict]:
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["phase"] == phase]


def quickstart(path: Path, *arguments: str) -> tuple[float, float]:
    """Runs it. Returns (greedy accuracy on validation after the warm start, on test at the end)."""
    subprocess.run([*SCRIPT, "--output-dir", str(path), *arguments], check=True, timeout=800)
    evaluations = lines(path, "evaluation")
    (test,) = [record for record in evaluations if record["eval/split"] == "test"]
    print(
        f"\nwarm start {evaluations[0]['eval/accuracy']:.3f} (pass@8 {evaluations[0]['eval/pass_at_8']:.3f}), "
        f"test {test['eval/accuracy']:.3f}"
    )
    return evaluations[0]["eval/accuracy"], test["eval/accuracy"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_learns_within_four_minutes(tmp_path, seed):
    subprocess.run(["bash", str(ROOT / "scripts" / "setup.sh")], check=True)
    start = time.monotonic()
    warm, test = quickstart(tmp_path / "run", "--seed", str(seed))
    seconds = time.monotonic() - start
    print(f"{seconds:.0f} s")
    assert warm <= 0.5 and test >= 0.95
    assert max(record["mismatch/kl"] for record in lines(tmp_path / "run", "reinforcement")) <= 1e-6
    assert seconds <= 240


def test_shuffled_rewards_teach_nothing(tmp_path):
    warm, test = quickstart(tmp_path / "run", "--task.shuffle-rewards", "True")
    assert abs(test - warm) <= 0.1


def test_the_first_reinforcement_step_comes_within_twenty_seconds(tmp_path):
    start = time.monotonic()
    process = subprocess.Popen(
        [*SCRIPT, "--output-dir", str(tmp_path / "run"), "--supervised.num-steps", "0", "--controller.num-steps", "1"]
    )
    metrics_file = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (
        metrics_file.exists() and '"phase":"reinforcement"' in metrics_file.read_text()
    ):
        time.sleep(0.05)
    seconds = time.monotonic() - start
    print(f"\n{seconds:.1f} s")
    assert process.wait(60) == 0
    assert seconds <= 20

"""Records the runs again: `python -m tests.recorded`, a quarter of a minute each."""

import subprocess
import sys

from tests.recorded import RECORDED

SHORT = [
    *("--supervised.num-steps", "12", "--supervised.batch-size", "32"),
    *("--algorithm.tasks-per-step", "4", "--controller.num-steps", "8", "--controller.eval-every", "4"),
    *("--controller.eval-tasks", "16", "--controller.test-tasks", "16", "--controller.pass-at-k", "2"),
]
KEPT = ("config.json", "metrics.jsonl")  # of the first run the rollouts, too


def main() -> None:
    root = RECORDED.parents[1]
    for name, group_size in (("quickstart", 4), ("groups", 8)):
        for seed in (0, 1):
            run = f"{name}-seed{seed}"
            arguments = ["configs/quickstart.py", *SHORT, "--algorithm.group-size", str(group_size)]
            where = ["--seed", str(seed), "--output-dir", f"runs/recorded/{run}"]
            subprocess.run(
                [sys.executable, "-m", "torchtitan_rl.cli", "train", *arguments, *where], cwd=root, check=True
            )
            subprocess.run(["rm", "-rf", str(RECORDED / run)], check=True)
            (RECORDED / run).mkdir()
            for kept in (*KEPT, "rollouts") if run == "quickstart-seed0" else KEPT:
                subprocess.run(
                    ["cp", "-r", str(root / "runs" / "recorded" / run / kept), str(RECORDED / run)], check=True
                )


if __name__ == "__main__":
    main()

"""What pairing is worth for the final accuracy: ten runs of other seeds, each beside a fork of itself.

    .venv/bin/python -m benchmarks.paired_seeds --output-dir DIR [--seeds 0 1 2] [--at 140 150]

Each seed trains the quickstart whole, with its own schedule. Forks of every run go on to the end with the change. Of
the ten pairs at each fork point are printed: the mean difference of greedy accuracy at the end, over 512 test tasks and
512 validation tasks; the variance of the differences; and that variance as a share of what it would be if each
changed run were compared with the unchanged run of another seed, Var(changed) + Var(unchanged) over the seeds, with
the interval of 95% that resampling the seeds gives. Bar: at most 0.3.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from benchmarks.paired_forks import ROOT, command
from torchtitan_rl.record.run_dir import RunDir

RESAMPLES = 10_000


def final_accuracy(run: Path, split: str) -> float:
    """Greedy accuracy of the run's last evaluation on the split's tasks."""
    return [line["eval/accuracy"] for line in RunDir(run).read_metrics() if line.get("eval/split") == split][-1]


def share_of_variance(unchanged: np.ndarray, changed: np.ndarray) -> np.ndarray:
    """Variance of the paired difference over that of an unpaired one; arrays [..., seeds] -> [...]."""
    unpaired = unchanged.var(axis=-1, ddof=1) + changed.var(axis=-1, ddof=1)
    return (changed - unchanged).var(axis=-1, ddof=1) / unpaired


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--at", type=int, nargs="+", default=[140, 150], help="steps to fork at, of 160")
    parser.add_argument("--set", default="trainer.optimizer.lr=8e-4", metavar="PATH=VALUE", help="the change")
    args = parser.parse_args()
    if len(args.seeds) < 3:
        parser.error(f"--seeds: a variance of {len(args.seeds)} differences says nothing; name at least three")
    runs = []
    for seed in args.seeds:
        runs.append(args.output_dir / f"seed-{seed}")
        command(
            *("train", runs[-1], str(ROOT / "configs" / "quickstart.py"), "--seed", str(seed)),
            *("--controller.eval-every", "160", "--controller.eval-tasks", "512", "--controller.pass-at-k", "1"),
            *("--controller.checkpoint-every", "10", "--controller.keep-last", "-1"),
        )
        for step in args.at:
            fork = args.output_dir / f"seed-{seed}-from-{step}"
            command("fork", fork, str(runs[-1]), "--at", str(step), "--set", args.set)
        print(f"seed {seed}: test accuracy {final_accuracy(runs[-1], 'test'):.3f}", flush=True)
    draws = np.random.default_rng(0).integers(0, len(runs), (RESAMPLES, len(runs)))
    for step in args.at:
        for split in ("test", "validation"):
            unchanged = np.array([final_accuracy(run, split) for run in runs])
            changed = np.array([final_accuracy(run.with_name(f"{run.name}-from-{step}"), split) for run in runs])
            share = share_of_variance(unchanged, changed)
            low, high = np.nanquantile(share_of_variance(unchanged[draws], changed[draws]), [0.025, 0.975])
            print(
                f"forked at {step}, {split}: mean difference {(changed - unchanged).mean():+.4f}, standard deviation "
                f"{(changed - unchanged).std(ddof=1):.4f}, unchanged runs {unchanged.std(ddof=1):.4f}; the paired "
                f"variance is {share:.2f} of the unpaired one ({low:.2f} to {high:.2f})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

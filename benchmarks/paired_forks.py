"""How much of the noise of a comparison is gone where two runs share their past and their draws.

    .venv/bin/python -m benchmarks.paired_forks --output-dir DIR [--seed 0] [--set PATH=VALUE] [--one-run]

One run of the quickstart at a constant learning rate has a checkpoint and an evaluation every 10 steps; a second one
has another seed. Forks go on for 20 steps with the change from ten checkpoints: of the first run with its draws and
with draws of their own, and of the second run with its draws. The unchanged arm is the first run itself. Printed are,
over the ten fork points, the differences of greedy validation accuracy (512 tasks) to the first run at the same step
and their variance, paired and unpaired (draws of their own; another seed), 10 and 20 steps after the fork; and by steps
after the fork, how alike the rollouts of one draw in both arms are. Bar: the paired variance is at most 0.3 of the
unpaired one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean, variance

import numpy as np

from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.record.run_dir import RunDir

ROOT = Path(__file__).parents[1]
EVERY, STEPS = 10, 20
PAIRED = "paired"
POINTS = range(30, 121, 10)


def command(verb: str, run: Path, *arguments: str) -> None:
    """Runs one verb of the command line, whose run is `run`. A run that has ended is not made again."""
    lines = RunDir(run).read_metrics() if run.exists() else []
    if any(line.get("eval/split") == "test" for line in lines):
        return
    words = [sys.executable, "-m", "torchtitan_rl.cli", verb, *arguments, "--output-dir", str(run), "--quiet"]
    subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def accuracy(run: Path, step: int) -> float:
    for line in RunDir(run).read_metrics():
        if line["phase"] == "evaluation" and line["step"] == step and line["eval/split"] == "validation":
            return line["eval/accuracy"]
    raise ValueError(f"{run}: was not evaluated at step {step}")


def alike(first: Path, second: Path, after: int) -> dict[int, tuple[float, float]]:
    """Steps after the fork -> (share of draws with the same tokens, correlation of the rewards of one draw)."""
    records_of_runs = []
    for run in (first, second):
        records = read_rollouts(RunDir(run))
        records_of_runs.append({(r["step"], r["rollout_id"]): r for r in records if after < r["step"] <= after + STEPS})
    pairs = defaultdict(list)
    for (step, name), record in records_of_runs[1].items():
        pairs[step - after].append((records_of_runs[0][step, name], record))
    result = {}
    for steps, step_pairs in sorted(pairs.items()):
        same = fmean(all(a["tokens"] == b["tokens"] for a, b in zip(x["turns"], y["turns"])) for x, y in step_pairs)
        rewards = [[x["reward"], y["reward"]] for x, y in step_pairs]
        result[steps] = same, float(np.corrcoef(np.array(rewards).T)[0, 1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", default="trainer.optimizer.lr=8e-4", metavar="PATH=VALUE", help="the change")
    parser.add_argument("--one-run", action="store_true", help="no run of another seed, and no forks of it")
    args = parser.parse_args()
    run, other = args.output_dir / "run", args.output_dir / "run-of-another-seed"
    for base, seed in ((run, args.seed),) if args.one_run else ((run, args.seed), (other, args.seed + 1)):
        command(
            *("train", base, str(ROOT / "configs" / "quickstart.py"), "--seed", str(seed)),
            *("--algorithm.schedule.decay", "constant", "--controller.num-steps", str(POINTS[-1] + STEPS)),
            *("--controller.eval-every", str(EVERY), "--controller.eval-tasks", "512", "--controller.pass-at-k", "1"),
            *("--controller.checkpoint-every", str(EVERY), "--controller.keep-last", "-1"),
        )
    differences: dict[int, dict[str, list[float]]] = {steps: defaultdict(list) for steps in (EVERY, STEPS)}
    likeness = defaultdict(list)
    for point in POINTS:
        kinds = [(PAIRED, run, []), ("own draws", run, ["--new-draws", "--set", f"seed={1000 + point}"])]
        if not args.one_run:
            kinds.append(("another seed", other, []))
        for kind, parent, own in kinds:
            fork = args.output_dir / f"{kind.replace(' ', '-')}-{point}"
            end = ["--set", f"controller.num_steps={point + STEPS}"]
            command("fork", fork, str(parent), "--at", str(point), "--set", args.set, *end, *own)
            for steps, differences_by_kind in differences.items():
                differences_by_kind[kind].append(accuracy(fork, point + steps) - accuracy(run, point + steps))
        for steps, step_pairs in alike(run, args.output_dir / f"{PAIRED}-{point}", point).items():
            likeness[steps].append(step_pairs)
        last = {kind: f"{so_far[-1]:+.3f}" for kind, so_far in differences[STEPS].items()}
        print(f"fork at {point}:", *(f"{kind} {value}" for kind, value in last.items()), flush=True)
    for steps, point_likeness in sorted(likeness.items()):
        same, correlation = (fmean(values) for values in zip(*point_likeness))
        print(
            f"{steps:2d} steps after: tokens equal in {same:.3f} of the draws, rewards correlate by {correlation:.3f}"
        )
    for steps, differences_by_kind in differences.items():
        for kind, differences_of_kind in differences_by_kind.items():
            ratio = variance(differences_by_kind[PAIRED]) / variance(differences_of_kind)
            print(
                f"{steps} steps after, {kind}: mean difference {fmean(differences_of_kind):+.3f}, variance "
                f"{variance(differences_of_kind):.3g}, the paired one's share of it {ratio:.2f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())

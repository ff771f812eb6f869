"""Test accuracy of algorithms on the quickstart's task, from its warm start, at settings that nobody tuned.

    python -m benchmarks.algorithm_accuracy                          # every algorithm of ALGORITHMS, seeds 0, 1 and 2
    python -m benchmarks.algorithm_accuracy --names opo vespo --seeds 0 --set algorithm.loss_config.k_pos=1.0

Each run is `torchtitan-rl train` on a config file that differs from the quickstart in its algorithm alone. Prints a
line per run as it ends, then a table; `--output-dir` keeps the runs' directories, for `torchtitan-rl plot`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torchtitan_rl.algorithm import minibatch_statistics, presets, reductions
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.tasks.letter_sort import partial_credit
from torchtitan_rl.tasks.rewards import Rewards
from torchtitan_rl.types import Task

ROOT = Path(__file__).parents[1]

# Two optimizer steps to a batch, so that not every ratio is 1; a step is of as many tasks as the quickstart's.
TWO_STEPS = {"tasks_per_step": 64, "tasks_per_minibatch": 32}
MINIBATCH = {**TWO_STEPS, "recompute_logprobs_per_minibatch": True, "reduction": reductions.token_mean}

ALGORITHMS: dict[str, Callable[..., AlgorithmConfig]] = {
    "dppo": partial(presets.dppo, **TWO_STEPS),
    "sapo": partial(presets.sapo, **TWO_STEPS),
    "gmpo": partial(presets.gmpo, **TWO_STEPS),
    "vespo": partial(presets.vespo, **TWO_STEPS),
    "gdpo": partial(presets.gdpo, **TWO_STEPS),
    "pass_at_k": partial(presets.pass_at_k, k=4, **TWO_STEPS),
    "opo": partial(presets.opo, tasks_per_step=32),  # the paper takes one step per batch
    # As many rollouts to a step as the others have, of tasks that all differ; and of as many tasks as the others.
    "remax": partial(presets.remax, tasks_per_step=512, tasks_per_minibatch=256),
    "remax_of_8": partial(presets.remax, group_size=8, reduction=reductions.sequence_mean, **TWO_STEPS),
    "reinforce_pp": partial(presets.reinforce_pp, group_size=8, **TWO_STEPS),
    "clip_cov": partial(presets.grpo, minibatch_fn=minibatch_statistics.clip_cov, **MINIBATCH),
    "kl_cov": partial(presets.grpo, minibatch_fn=minibatch_statistics.kl_cov, **MINIBATCH),
    "top_entropy": partial(presets.grpo, minibatch_fn=minibatch_statistics.top_entropy, **MINIBATCH),
}


def exact(task: Task, completions: list[str]) -> list[float]:
    return [float(completion == task.answer) for completion in completions]


def letters(task: Task, completions: list[str]) -> list[float]:
    return [partial_credit(completion, task.answer) for completion in completions]


def config(name: str) -> RunConfig:
    """The quickstart with the algorithm `name`. `gdpo` also gets the task's reward as two parts of the same sum."""
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.name = name
    config.algorithm = ALGORITHMS[name](schedule=config.algorithm.schedule)
    if name == "gdpo":
        config.task.reward = Rewards({"exact": (exact, 0.5), "letters": (letters, 0.5)})
    return config


def accuracies(directory: Path) -> dict[str, list[float]]:
    """By split, in the order of the run, from its `metrics.jsonl`."""
    by_split: dict[str, list[float]] = {"validation": [], "test": []}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if metrics["phase"] == "evaluation":
            by_split[metrics["eval/split"]].append(metrics["eval/accuracy"])
    return by_split


def train(name: str, seed: int, directory: Path, changes: Sequence[str]) -> dict:
    """Raises RuntimeError with the last lines of a run that failed."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, f"{name}.py")
        file.write_text(
            f"from benchmarks import algorithm_accuracy\n\n\ndef config():\n"
            f"    return algorithm_accuracy.config({name!r})\n"
        )
        flags = [f"--{change}" for change in changes]
        command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(file), "--quiet", *flags]
        command += ["--seed", str(seed), "--output-dir", str(directory)]
        began = time.perf_counter()
        run = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - began
    if run.returncode != 0:
        last = "\n".join((run.stdout + run.stderr).splitlines()[-20:])
        raise RuntimeError(f"{name}, seed {seed}: training ended with {run.returncode}\n{last}")
    measured = accuracies(directory)
    return {
        "name": name,
        "seed": seed,
        "test": measured["test"][-1],
        "validation": measured["validation"],
        "seconds": round(seconds),
    }


def table(rows: Sequence[dict]) -> str:
    """Markdown, an algorithm per line."""
    seeds = sorted({row["seed"] for row in rows})
    lines = ["| algorithm | " + " | ".join(f"seed {seed}" for seed in seeds) + " | seconds |"]
    lines += ["|" + "---|" * (len(seeds) + 2)]
    for name in dict.fromkeys(row["name"] for row in rows):
        runs = {row["seed"]: row for row in rows if row["name"] == name}
        cells = [f"{runs[seed]['test']:.3f}" if seed in runs else "" for seed in seeds]
        seconds = [run["seconds"] for run in runs.values()]
        lines.append(f"| `{name}` | " + " | ".join(cells) + f" | {min(seconds)} to {max(seconds)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="of the config, for every run")
    parser.add_argument("--output-dir", type=Path, help="where the runs' directories are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        rows = []
        for seed in args.seeds:
            for name in args.names:
                directory = (args.output_dir or Path(temporary)).resolve() / f"{name}_{seed}"
                rows.append(train(name, seed, directory, args.set))
                print(json.dumps(rows[-1]), flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()

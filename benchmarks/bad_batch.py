"""Whether `replay --influence` finds one bad batch of a hundred.

    .venv/bin/python -m benchmarks.bad_batch --output-dir DIR [--seeds 0 1 2] [--steps 100]

Each run is the quickstart with one batch, drawn with the seed, whose rewards are one minus what they should be. Asked:
the batch is among the three that `replay RUN --influence` puts first, of all batches. Prints a line per seed; exit
status 1 where it is not in nine of ten.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import bad_batch
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.tasks.family import source_of
from torchtitan_rl.tasks.letter_sort import partial_credit
from torchtitan_rl.types import Task

ROOT = Path(__file__).parents[1]
AMONG, SHARE = 3, 0.9


@dataclass(slots=True)
class Flipped:
    """The quickstart's reward; of some tasks it is one minus that."""

    tasks: list[str]
    """Their ids."""

    def __call__(self, task: Task, completions: list[str]) -> list[float]:
        rewards = [partial_credit(completion, task.answer) for completion in completions]
        return [1.0 - reward for reward in rewards] if task.id in self.tasks else rewards


def config(path: str, seed: int, steps: int, bad: int) -> RunConfig:
    """The quickstart with `steps` batches, of which number `bad` (from 0) has the other rewards."""
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir, config.seed = path, seed
    config.controller.num_steps, config.controller.eval_every, config.controller.pass_at_k = steps, 0, 1
    drawn = source_of(config.task.build(), "train", seed).next((bad + 1) * config.algorithm.tasks_per_step)
    config.task.reward = bad_batch.Flipped([task.id for task in drawn[bad * config.algorithm.tasks_per_step :]])
    return config


def command(*words: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "torchtitan_rl.cli", *words], cwd=ROOT, capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError(f"{words[0]} {words[1]} failed: {ended.stderr[-2000:]}")


def rank(root: Path, seed: int, steps: int, window: int) -> tuple[int, int, float]:
    """(the bad batch's step, its place in the order by influence from 1, its standard deviations from the usual)."""
    bad, name = random.Random(seed).randrange(steps), f"{seed}-of-{steps}-steps"  # `steps` decide which batch is bad
    run, replayed, file = root / f"run-{name}", root / f"replay-{name}-{window}", root / f"config-{name}.py"
    file.write_text(
        f"from benchmarks import bad_batch\n\n\ndef config():\n"
        f"    return bad_batch.config({str(run)!r}, {seed}, {steps}, {bad})\n"
    )
    if not (run / "curve.png").exists():  # which a run draws at its end; one that was cut off is refused
        command("train", str(file), "--quiet")
    if not (replayed / "influence.jsonl").exists():
        options = ["--influence", "--window", str(window), "--backend", "local", "--output-dir", str(replayed)]
        command("replay", str(run), "--config", str(file), "--quiet", *options)
    lines = [json.loads(line) for line in (replayed / "influence.jsonl").read_text().splitlines()]
    in_order = sorted(lines, key=lambda line: line["deviations"])
    place = next(i for i, line in enumerate(in_order) if line["step"] == bad + 1)
    return bad + 1, place + 1, in_order[place]["deviations"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--window", type=int, default=3)
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    places = []
    for seed in args.seeds:
        start = time.monotonic()
        step, place, deviations = rank(args.output_dir.absolute(), seed, args.steps, args.window)
        places.append(place)
        print(
            f"seed {seed}: the bad batch, step {step}, is number {place} of {args.steps}, {deviations:+.1f} standard "
            f"deviations; {time.monotonic() - start:.0f} s",
            flush=True,
        )
    among = sum(place <= AMONG for place in places)
    print(f"among the first {AMONG}: {among} of {len(places)}")
    return int(among < SHARE * len(places))


if __name__ == "__main__":
    sys.exit(main())

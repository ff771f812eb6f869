"""Trains one config twice and says whether metrics and rollouts are the same to the last digit.

    .venv/bin/python scripts/same_bytes.py configs/quickstart.py      this checkout against itself
    ... --against ../other                                            against another checkout
    ... --load 4 --jitter                                             the second run with work beside it, and stops

Arguments it does not know go to both runs, such as `--seed 1` or `--generator.num-replicas 2`. Compared are the columns
of `COLUMNS` in every line of `metrics.jsonl`, and every record of `rollouts/`. Exit status 1 on a difference.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.record.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("reward/", "loss/", "eval/", "optim/", "policy/", "mismatch/", "completion/", "advantage/")
BUSY = "import torch; a = torch.rand(1024, 1024)\nwhile True: a = (a @ a).softmax(-1)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="relative to the root of both checkouts")
    parser.add_argument("--against", type=Path, default=ROOT, metavar="DIR", help="the checkout of the second run")
    parser.add_argument("--supervised-steps", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of reinforcement")
    parser.add_argument("--eval-tasks", type=int, default=64, help="of each evaluation; there is none in between")
    parser.add_argument("--whole", action="store_true", help="the config's own steps and evaluations instead")
    parser.add_argument("--load", type=int, default=0, metavar="N", help="busy processes beside the second run")
    parser.add_argument("--jitter", action="store_true", help="stops processes of the second run at random moments")
    args, overrides = parser.parse_known_args()
    if not args.whole:
        overrides += ["--supervised.num-steps", str(args.supervised_steps), "--controller.num-steps", str(args.steps)]
        overrides += ["--controller.eval-every", "0", "--controller.eval-tasks", str(args.eval_tasks)]
        overrides += ["--controller.test-tasks", str(args.eval_tasks)]
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory, name) for name in ("first", "second")]
        train(ROOT, args.config, paths[0], overrides)
        with busy(args.load):
            train(args.against.resolve(), args.config, paths[1], overrides, jitter=args.jitter)
        return compare(*paths)


def train(checkout: Path, config: str, path: Path, overrides: list[str], *, jitter: bool = False) -> None:
    """One run of a checkout's own package and config. SystemExit with the last lines it printed when it fails."""
    command = [sys.executable, "-m", "torchtitan_rl.cli", "train", config, "--quiet", "--output-dir", str(path)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    with tempfile.TemporaryFile("w+") as output:
        run = psutil.Popen(command + overrides, cwd=checkout, env=environment, stdout=output, stderr=output)
        try:
            while run.poll() is None:
                stop_one(run) if jitter else time.sleep(0.2)
        finally:
            with suppress(psutil.NoSuchProcess):
                run.kill()
        if run.returncode != 0:
            output.seek(0)
            sys.exit(f"{checkout}: training ended with {run.returncode}\n" + "".join(output.readlines()[-20:]))


def stop_one(run: psutil.Popen) -> None:
    """Stops one of the run's processes for up to 0.3 s: what it waits for has then come, what it sends comes late."""
    time.sleep(random.uniform(0, 0.2))
    with suppress(psutil.NoSuchProcess):
        process = random.choice([run, *run.children(recursive=True)])
        process.suspend()
        try:
            time.sleep(random.uniform(0, 0.3))
        finally:
            process.resume()


@contextmanager
def busy(count: int):
    """Processes that multiply matrices on every core for as long as this lasts."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def compare(first: Path, second: Path) -> int:
    """Prints where metrics and rollouts first differ, or that none does. Returns the exit status."""
    names, num_lines, same = set(), 0, True
    for part, rows in (("metrics.jsonl", metrics), ("rollouts", rollouts)):
        lines, other_lines = rows(first), rows(second)
        if part == "rollouts" and lines and other_lines:  # versions of the package may record more or fewer columns
            both = lines[0].keys() & other_lines[0].keys() - {"seconds", "turn_seconds"}
            lines, other_lines = (
                [{k: row[k] for k in both} for row in run_lines] for run_lines in (lines, other_lines)
            )
        names, num_lines = names.union(*lines), num_lines + len(lines)
        differing = (i for i, (a, b) in enumerate(zip(lines, other_lines)) if a != b)
        if (i := next(differing, None)) is not None:
            keys = [key for key in lines[i] | other_lines[i] if lines[i].get(key) != other_lines[i].get(key)]
            shown = "; ".join(f"{key} {lines[i].get(key)} and {other_lines[i].get(key)}" for key in keys)
            print(f"{part}: first differs in line {i + 1}: {shown}")
            same = False
        elif len(lines) != len(other_lines):
            print(f"{part}: has {len(lines)} lines in the first run and {len(other_lines)} in the second")
            same = False
    if same:
        print(f"identical: {len(names)} columns, {num_lines} lines")
    return 0 if same else 1


def metrics(run: Path) -> list[dict[str, str]]:
    """The compared columns of metrics.jsonl, values as Python writes them."""
    lines = RunDir(run).read_metrics()
    return [{k: repr(value) for k, value in line.items() if k.startswith(COLUMNS)} for line in lines]


def rollouts(run: Path) -> list[dict[str, str]]:
    """The records of all rollouts, values as Python writes them."""
    records = list(read_rollouts(RunDir(run)))
    for sequence in (sequence for record in records for sequence in record["sequences"] or ()):
        del sequence["turns"]  # which older versions of the package do not record; tokens and masks say the same
    for turn in (turn for record in records for turn in record["turns"] or ()):
        del turn["seed"], turn["extends"]  # neither do they record these
    return [{k: repr(value) for k, value in record.items()} for record in records]


if __name__ == "__main__":
    sys.exit(main())

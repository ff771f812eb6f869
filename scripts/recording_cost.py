"""What recording everything costs: CPU seconds and wall time of the quickstart against a run that records nothing.

    .venv/bin/python scripts/recording_cost.py [--pairs 20] [--steps 20] [--supervised-steps 20] [--whole]

Each pair is two runs with the same seed, one after the other, which of them first alternates. CPU seconds are user and
system time of all processes of a run: this process adopts the orphans of a run, and the kernel adds up what it has
waited for. Prints a line of JSON per pair, then the median of the pairs' ratios with its 95% bootstrap interval. Wants
idle cores.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
SWITCHES = ("record.timeline", "record.health", "record.diagnose", "record.tensorboard", "controller.record-tokens")
"""What is on in one run and off in the other. Explanations of the mismatch have a bound of their own, and Weights &
Biases is a program of its own."""
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def measured(overrides: Sequence[str]) -> tuple[float, float]:
    """(CPU seconds of all processes, seconds) of a run. SystemExit with the last lines that it printed if it fails."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as output:
        config, path = ROOT / "configs" / "quickstart.py", Path(directory, "run")
        command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(config), "--quiet", *overrides]
        before, began = _cpu_seconds(), time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        run = subprocess.Popen(
            [*command, "--output-dir", str(path)], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
        code = run.wait()
        seconds = time.perf_counter() - began
        _wait_for_orphans()
        if code != 0:
            output.seek(0)
            sys.exit(f"training ended with {code}\n" + "".join(output.readlines()[-20:]))
        return _cpu_seconds() - before, seconds


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_for_orphans() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:  # there is none left
        return


def interval(ratios: Sequence[float], *, draws: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% percentile bootstrap interval of the median."""
    source = random.Random(seed)
    medians = sorted(median(source.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of reinforcement")
    parser.add_argument("--supervised-steps", type=int, default=20)
    parser.add_argument("--whole", action="store_true", help="the config's own steps and evaluations instead")
    args, overrides = parser.parse_known_args()
    if not args.whole:
        overrides += ["--supervised.num-steps", str(args.supervised_steps), "--controller.num-steps", str(args.steps)]
        overrides += ["--controller.eval-every", "0", "--controller.eval-tasks", "64", "--controller.test-tasks", "64"]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    cpu, wall = [], []
    for pair in range(args.pairs):
        kinds = {"everything": "True", "nothing": "False"}
        order = list(kinds) if pair % 2 else list(kinds)[::-1]
        found = {
            name: measured([word for field in SWITCHES for word in (f"--{field}", kinds[name])] + overrides)
            for name in order
        }
        cpu.append(found["everything"][0] / found["nothing"][0])
        wall.append(found["everything"][1] / found["nothing"][1])
        row = {name: {"cpu_s": round(one, 2), "wall_s": round(other, 2)} for name, (one, other) in found.items()}
        print(json.dumps({"pair": pair + 1, **row, "cpu_ratio": round(cpu[-1], 4)}), flush=True)
    low, high = interval(cpu)
    summary = {"pairs": len(cpu), "cpu_ratio": median(cpu), "low": low, "high": high, "wall_ratio": median(wall)}
    print(json.dumps({name: round(value, 4) for name, value in summary.items()}))


if __name__ == "__main__":
    main()

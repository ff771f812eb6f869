"""CPU seconds of the quickstart in this checkout against another checkout of the project, in pairs of runs.

    .venv/bin/python -m benchmarks.cpu_pairs CHECKOUT [--pairs 20] [--steps 20] [--supervised-steps 20] [--whole]

The two runs of a pair have the same seed and go at the same time, each on its half of the cores. The runs change halves
every two seconds, so a core that is slower for a while slows both. CPU seconds are user and system time of all
processes of a run: its parent adopts orphans, and the kernel adds up what the parent has waited for. Prints a line of
JSON per pair, then the median of the pairs' ratios (this checkout / CHECKOUT) with its 95% bootstrap interval. Needs
two cores and wants them idle. CHECKOUT runs with this one's packages.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from torchtitan_rl.tools.bench.measurement import interval

ROOT = Path(__file__).resolve().parents[1]
_TURN_S = 2.0  # short beside a run and long beside a move, some milliseconds of a core
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Side(NamedTuple):
    """One of the two things that are compared: a checkout, and what its quickstart's config is changed to."""

    name: str
    root: Path
    overrides: tuple[str, ...]


class Used(NamedTuple):
    cpu_s: float
    wall_s: float


def compare(one: Side, other: Side, pairs: int) -> None:
    """Prints every pair, then the median of `one` / `other` with its interval."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit(f"cores={len(cores)}: the two runs of a pair need a core each; run this on a machine with more cores")
    halves = cores[: len(cores) // 2], cores[len(cores) // 2 : len(cores) // 2 * 2]
    cpu, wall = [], []
    for pair in range(pairs):
        used = _at_once((one, other), halves)
        cpu.append(used[one].cpu_s / used[other].cpu_s)
        wall.append(used[one].wall_s / used[other].wall_s)
        row = {side.name: {name: round(value, 2) for name, value in used[side]._asdict().items()} for side in used}
        print(json.dumps({"pair": pair + 1, **row, "cpu_ratio": round(cpu[-1], 4)}), flush=True)
    low, high = interval(cpu)
    summary = {"cpu_ratio": median(cpu), "low": low, "high": high, "wall_ratio": median(wall)}
    print(json.dumps({"pairs": pairs} | {name: round(value, 4) for name, value in summary.items()}))


def _at_once(sides: tuple[Side, Side], halves: tuple[list[int], list[int]]) -> dict[Side, Used]:
    parents = [ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) for _ in sides]
    try:
        pids = [parent.submit(os.getpid).result() for parent in parents]
        runs = [parent.submit(_measured, side, half) for parent, side, half in zip(parents, sides, halves, strict=True)]
        while wait(runs, timeout=_TURN_S).not_done:
            halves = halves[1], halves[0]
            for pid, half in zip(pids, halves, strict=True):
                _move(pid, half)
        return {side: run.result() for side, run in zip(sides, runs, strict=True)}
    finally:
        for parent in parents:
            parent.shutdown()


def _move(pid: int, cores: list[int]) -> None:
    """Moves all threads of a process and of its descendants to `cores`. What starts meanwhile is moved the next
    time."""
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            for thread in process.threads():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, cores)


def _measured(side: Side, cores: list[int]) -> Used:
    """Of one run, in a process that had no other children. RuntimeError with the run's last lines if it fails."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.sched_setaffinity(0, cores)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(side.root / "configs" / "quickstart.py")]
        command += ["--quiet", *side.overrides, "--output-dir", str(Path(directory, "run"))]
        before, began = _cpu_seconds(), time.perf_counter()
        environment = os.environ | {"PYTHONPATH": str(side.root)}
        run = subprocess.Popen(command, cwd=side.root, env=environment, stdout=output, stderr=output)
        code = run.wait()
        seconds = time.perf_counter() - began
        _wait_for_orphans()
        if code != 0:
            output.seek(0)
            raise RuntimeError(f"{side.name}: training ended with {code}\n" + "".join(output.readlines()[-20:]))
        return Used(_cpu_seconds() - before, seconds)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait_for_orphans() -> None:
    try:
        while True:
            os.wait()
    except ChildProcessError:  # there is none left
        return


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the arguments that every comparison has."""
    arguments_parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments_parser.add_argument("--pairs", type=int, default=20)
    arguments_parser.add_argument("--steps", type=int, default=20, help="of reinforcement")
    arguments_parser.add_argument("--supervised-steps", type=int, default=20)
    arguments_parser.add_argument("--whole", action="store_true", help="the config's own steps and evaluations instead")
    return arguments_parser


def length(args: argparse.Namespace) -> tuple[str, ...]:
    """What makes the quickstart as long as `args` asks for."""
    if args.whole:
        return ()
    steps = ("--supervised.num-steps", str(args.supervised_steps), "--controller.num-steps", str(args.steps))
    return *steps, "--controller.eval-every=0", "--controller.eval-tasks=64", "--controller.test-tasks=64"


def main() -> None:
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("checkout", type=Path)
    args, more = arguments_parser.parse_known_args()
    overrides = (*length(args), *more)
    base = args.checkout.resolve()
    compare(Side("this", ROOT, overrides), Side(str(args.checkout), base, overrides), args.pairs)


if __name__ == "__main__":
    main()

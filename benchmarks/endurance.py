"""A long run of very small steps: whether any process of it grows.

    .venv/bin/python benchmarks/endurance.py [--steps 1000] [--from-step 200] [--output-dir DIR]

Reads resident memory, file descriptors and threads of every process of a run, every ten steps. Asked: from
`--from-step` to the end resident memory grows less than 3%, and the counts stay. Compared are medians over the first
and the last tenth of that stretch, because memory goes up and down within a step. Exit status 1 where a process grew,
and where no process was read often enough to say.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import psutil

from torchtitan_rl.record.run_dir import RunDir

ROOT = Path(__file__).parents[1]
GROWTH = 0.03
EVERY, MIN_READINGS = 10, 20


def command(path: Path, steps: int) -> list[str]:
    settings = {
        "supervised.num-steps": 1,
        "supervised.batch-size": 4,
        "algorithm.tasks-per-step": 1,
        "algorithm.group-size": 2,
        "generator.num-replicas": 1,
        "controller.num-steps": steps,
        "controller.checkpoint-every": 50,
        "controller.eval-every": 100,
        "controller.eval-tasks": 4,
        "controller.test-tasks": 4,
        "controller.pass-at-k": 2,
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    train = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(ROOT / "configs" / "quickstart.py")]
    return [*train, *flags, "--quiet", "--output-dir", str(path)]


def names(run_dir: RunDir, pids: list[int]) -> dict[int, str]:
    """Process id -> role, by the first lines of the logs; the controller has none of these."""
    role_of = {}
    for log in run_dir.logs.glob("*.log"):
        text = log.read_text(errors="replace")
        role_of.update({pid: log.stem for pid in pids if f"pid {pid}," in text})
    return {pid: role_of.get(pid, f"controller {i}") for i, pid in enumerate(pids)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--from-step", type=int, default=200)
    parser.add_argument("--output-dir", default="")
    args = parser.parse_args()
    path = Path(args.output_dir or tempfile.mkdtemp(prefix="torchtitan-rl-endurance-") + "/run")
    run_dir, began = RunDir(path), time.monotonic()
    process = psutil.Popen(command(path, args.steps), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    readings: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
    done = 0
    while process.poll() is None:
        lines = run_dir.metrics_file.read_text().split("\n") if run_dir.metrics_file.exists() else []
        step = max((json.loads(line)["step"] for line in lines[:-1] if '"reinforcement"' in line), default=0)
        if step >= done + EVERY:
            done = step
            for each in [process, *process.children(recursive=True)]:
                try:
                    with each.oneshot():
                        row = (step, each.memory_info().rss, each.num_fds(), each.num_threads())
                    readings[each.pid].append(row)
                except psutil.NoSuchProcess:
                    pass
            roles = names(run_dir, list(readings))
        time.sleep(0.05)
    status, grew, compared = process.wait(), [], 0
    for pid, rows in readings.items():
        rows = [row for row in rows if row[0] >= args.from_step]
        tenth = max(1, len(rows) // 10)
        if len(rows) < MIN_READINGS:
            continue
        compared += 1
        first, last = ([median(column) for column in zip(*part, strict=True)] for part in (rows[:tenth], rows[-tenth:]))
        growth = last[1] / first[1] - 1
        line = {
            "process": roles[pid],
            "rss_mib": [round(first[1] / 2**20, 1), round(last[1] / 2**20, 1)],
            "growth": round(growth, 4),
            "descriptors": [first[2], last[2]],
            "threads": [first[3], last[3]],
        }
        print(json.dumps(line), flush=True)
        if growth >= GROWTH or last[2] > first[2] or last[3] > first[3]:
            grew.append(roles[pid])
    print(json.dumps({"status": status, "steps": done, "seconds": round(time.monotonic() - began), "grew": grew}))
    if not compared:
        print(
            f"error: --steps={args.steps}: no process was read {MIN_READINGS} times from step {args.from_step} on, so "
            f"nothing was compared; give --steps {args.from_step + EVERY * MIN_READINGS} or more",
            file=sys.stderr,
        )
    return 1 if grew or status or not compared else 0


if __name__ == "__main__":
    sys.exit(main())

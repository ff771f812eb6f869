"""Kills a run at random moments, lets it go on each time, and compares it with a run that nobody disturbed.

    scripts/chaos.sh [--kills 20] [--steps 40] [--seed 0] [--who run|controller,trainer] [--lag 0]
                     [--output-dir DIR]

`--who run` kills every process of the run and starts the command again with `--resume auto`. Any other list is killed
one after the other, in turn, under `--max-restarts`: nobody starts anything again. Each kill prints a witness: what was
killed, in which phase, what the run was doing. Exit status 0 if the audit is clean, and rewards, losses, accuracies,
gradient norms and the order of the data are the same to the byte. With a lag, versions of tokens depend on time: then
every step must have trained on the same tasks, no token may be older than the lag, and the lengths of trained
completions must be distributed alike (two-sample Kolmogorov-Smirnov). In either case nothing of the run may be left in
/dev/shm: no segment and no semaphore (`sem.mp-*`) that no process maps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
from scipy.stats import ks_2samp

from torchtitan_rl.record.attempts import attempts as attempts_of
from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.audit import audit

ROOT = Path(__file__).parents[1]
COLUMNS = ("reward/", "loss/", "eval/", "optim/", "policy/", "mismatch/", "completion/", "critic/")
WAITS_S = 600.0
SIGNIFICANT = 0.01


def command(output_dir: Path, steps: int, lag: int, *more: str) -> list[str]:
    """A short run of the quickstart with a checkpoint every other step."""
    settings = {
        "algorithm.max-policy-lag": lag,
        "supervised.num-steps": max(4, steps // 4),
        "supervised.batch-size": 16,
        "supervised.schedule.warmup-steps": 1,
        "algorithm.tasks-per-step": 4,
        "algorithm.schedule.warmup-steps": 1,
        "controller.num-steps": steps,
        "controller.checkpoint-every": 2,
        "controller.eval-every": 10,
        "controller.eval-tasks": 16,
        "controller.test-tasks": 16,
        "controller.pass-at-k": 2,
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    train = [sys.executable, "-m", "torchtitan_rl.cli", "train", str(ROOT / "configs" / "quickstart.py")]
    return [*train, *flags, "--quiet", "--output-dir", str(output_dir), *more]


def start(output_dir: Path, steps: int, lag: int, *more: str) -> psutil.Popen:
    log = open(output_dir.parent / f"{output_dir.name}.log", "a")
    return psutil.Popen(
        command(output_dir, steps, lag, *more), cwd=ROOT, stdout=log, stderr=log, start_new_session=True
    )


def lines(output_dir: Path) -> list[dict]:
    file = output_dir / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def compared(output_dir: Path) -> tuple[list[dict], list[tuple]]:
    """What must not change: metrics but times, and which task was rolled out for which step."""
    metrics = [
        {name: repr(value) for name, value in line.items() if name in ("step", "phase") or name.startswith(COLUMNS)}
        for line in lines(output_dir)
        if line["phase"] != "checkpoint"
    ]
    order = [
        (r["step"], r["task_id"], r["rollout_id"], r["text"], r["reward"]) for r in read_rollouts(RunDir(output_dir))
    ]
    return metrics, order


def of_lag(undisturbed: Path, disturbed: Path, lag: int) -> dict[str, bool]:
    """What must hold for two runs with a lag, see the top of this file."""
    tasks, lengths = [], []
    for path in (undisturbed, disturbed):
        records = list(read_rollouts(RunDir(path)))
        tasks.append(sorted((record["step"], record["draw"], record["rollout_id"]) for record in records))
        lengths.append([sum(record["num_tokens"]) for record in records if not record["left_out"]])
    oldest = max(line["policy/lag_max"] for line in lines(disturbed) if line["phase"] == "reinforcement")
    return {
        "tasks_identical": tasks[0] == tasks[1],
        "lag_within": oldest <= lag,
        "lengths_alike": bool(ks_2samp(*lengths).pvalue > SIGNIFICANT),
    }


def left_in_shared_memory(before: set[str]) -> list[str]:
    """Segments and semaphores in /dev/shm that are new and that no process maps: other programs may use the machine."""
    left = set(os.listdir("/dev/shm")) - before
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        try:
            text = maps.read_text()
        except OSError:
            continue  # the process has ended
        left = {name for name in left if name not in text}
    return sorted(left)


def has_come(output_dir: Path, target: float) -> bool:
    """Whether the run has made `target` steps, of both phases."""
    return sum(line["phase"] in ("supervised", "reinforcement") for line in lines(output_dir)) >= target


def has_begun(output_dir: Path, number: int) -> bool:
    """Whether more than `number` attempts have begun."""
    return len(attempts(output_dir)) > number


def doing(output_dir: Path, process: psutil.Process) -> str:
    """In which phase a run is, and what it is doing, by its files and the CPU time of its processes."""
    last = next((line for line in reversed(lines(output_dir)) if line["phase"] != "checkpoint"), None)
    where = f"after {last['phase']} step {last['step']}" if last else "before its first step"
    saving = [path.name for path in (output_dir / "checkpoints").glob("*.writing")]
    busy = max(
        ((p.cpu_percent(0.02), name(p, output_dir)) for p in process.children(recursive=True) if p.is_running()),
        default=(0, "nobody"),
    )
    return f"{where}; busiest: {busy[1]}" + (f"; writing {saving[0].removesuffix('.writing')}" if saving else "")


def name(process: psutil.Process, output_dir: Path) -> str:
    """The role of a process, by the first lines of the run's logs."""
    for log in (output_dir / "logs").glob("*.log"):
        if f"pid {process.pid}," in log.read_text(errors="replace"):
            return log.stem
    return "a start-up"


def wait_until(condition, process: psutil.Popen) -> bool:
    """Waits until the condition holds or the process has ended; returns whether the condition holds."""
    end = time.monotonic() + WAITS_S
    while not (satisfied := condition()) and process.poll() is None:
        if time.monotonic() > end:
            raise RuntimeError(f"nothing happened for {WAITS_S:g} s; the run hangs")
        time.sleep(0.005)
    return satisfied


def everything(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill_run(output_dir: Path, steps: int, lag: int, kills: int, draw: random.Random) -> None:
    """Kills the whole run `kills` times, at least once in its supervised phase, the last two in a row, and lets it
    end."""
    total = max(4, steps // 4) + steps
    supervised = max(4, steps // 4)
    targets = sorted([draw.uniform(1, supervised), *(draw.uniform(0, total) for _ in range(kills - 2))])
    targets.append(targets[-1])  # twice in a row: the second one during the start, or right after it
    for number, target in enumerate(targets, 1):
        process = start(output_dir, steps, lag, "--resume", "auto")
        began, twice = len(attempts(output_dir)), number == kills
        wait_until(partial(has_begun, output_dir, began), process)
        pause = draw.uniform(0, 12) if twice else draw.uniform(0, 0.4)
        if twice or wait_until(partial(has_come, output_dir, target), process):
            time.sleep(pause)
        elif process.poll() is not None:
            raise RuntimeError(f"the run ended with status {process.poll()} before kill {number}")
        print(f"kill {number}: the whole run, {doing(output_dir, process)}", flush=True)
        victims = everything(process)
        for victim in victims:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(victims, timeout=15)
    status = start(output_dir, steps, lag, "--resume", "auto").wait(WAITS_S)
    if status != 0:
        raise RuntimeError(f"the last attempt ended with status {status}; see {output_dir}.log")


def attempts(output_dir: Path) -> list[dict]:
    return attempts_of(RunDir(output_dir))


def kill_one(output_dir: Path, steps: int, lag: int, kills: int, who: list[str], draw: random.Random) -> None:
    """Kills one process after the other, under `--max-restarts`, and waits for the end."""
    total = max(4, steps // 4) + steps
    process = start(output_dir, steps, lag, "--max-restarts", str(kills + 1))
    for number in range(1, kills + 1):
        target = number * total / (kills + 1)
        if not wait_until(partial(has_come, output_dir, target), process):
            raise RuntimeError(f"the run ended with status {process.poll()} before kill {number}")
        time.sleep(draw.uniform(0, 0.4))
        victim = find(who[(number - 1) % len(who)], output_dir, process)
        began = len(attempts(output_dir))
        print(f"kill {number}: {who[(number - 1) % len(who)]}, {doing(output_dir, process)}", flush=True)
        os.kill(victim, signal.SIGKILL)
        if not wait_until(partial(has_begun, output_dir, began), process):
            raise RuntimeError(f"no attempt followed kill {number}; see {output_dir}.log")
    if (status := process.wait(WAITS_S)) != 0:
        raise RuntimeError(f"the run ended with status {status}; see {output_dir}.log")


def find(who: str, output_dir: Path, process: psutil.Process) -> int:
    """Process id of the controller or of the policy's first rank, in the newest attempt. An attempt has the steps of
    those before it, and no process at first. Raises RuntimeError where the run ends before there is one."""

    def pids() -> list[int]:
        controller = psutil.Process(attempts(output_dir)[-1]["pid"])
        if who == "controller":
            return [controller.pid]
        return [child.pid for child in controller.children(recursive=True) if name(child, output_dir) == "policy-0"]

    def there() -> bool:
        with suppress(psutil.NoSuchProcess):  # it has ended, and another attempt follows
            return bool(pids())
        return False

    if not wait_until(there, process):
        raise RuntimeError(f"the run ended before it had a {who} to kill; see {output_dir}.log")
    return pids()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--who", default="run")
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--output-dir", default="")
    args = parser.parse_args()
    if args.who != "run" and (unknown := set(args.who.split(",")) - {"controller", "trainer"}):
        parser.error(f"--who {args.who}: knows no {', '.join(sorted(unknown))}; use run, or controller,trainer")
    if args.who == "run" and args.kills < 2:
        parser.error(f"--kills {args.kills}: the run is killed twice in a row at its end; give 2 or more")
    place = Path(args.output_dir or tempfile.mkdtemp(prefix="torchtitan-rl-chaos-")).absolute()
    place.mkdir(parents=True, exist_ok=True)
    undisturbed, disturbed = place / "undisturbed", place / "disturbed"
    before = set(os.listdir("/dev/shm"))
    if start(undisturbed, args.steps, args.lag).wait(WAITS_S) != 0:
        raise RuntimeError(f"the undisturbed run failed; see {undisturbed}.log")
    draw = random.Random(args.seed)
    if args.who == "run":
        kill_run(disturbed, args.steps, args.lag, args.kills, draw)
    else:
        kill_one(disturbed, args.steps, args.lag, args.kills, args.who.split(","), draw)
    (metrics, order), (metrics_too, order_too) = compared(undisturbed), compared(disturbed)
    counts, problems = audit(RunDir(disturbed))
    for problem in problems:
        print(f"problem: {problem}")
    if args.lag:
        holds = of_lag(undisturbed, disturbed, args.lag)
    else:
        holds = {"metrics_identical": metrics == metrics_too, "data_identical": order == order_too}
    left = left_in_shared_memory(before)
    holds["shared_memory_empty"] = not left
    for name_left in left:
        print(f"problem: /dev/shm/{name_left} is left over")
    print(json.dumps({
        "kills": args.kills, "attempts": len(attempts(disturbed)), "lines": len(metrics), "rollouts": len(order),
        "audit": counts, **holds,
    }))  # fmt: skip
    return 0 if all(holds.values()) and not problems else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, subprocess.SubprocessError) as error:
        sys.exit(f"error: {error}")

"""Seeds faults that need processes of their own: killed and slowed replicas, a run that hangs and is killed.

    .venv/bin/python -m benchmarks.diagnose_faults_actors killed|slowed|hung DIR

`DIR` holds the starting points of `benchmarks/diagnose_faults.py warm`. What is said of a hanging run is noted in its
directory as `said.json` while its process is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.diagnose_faults import quickstart, trained
from torchtitan_rl.actors.operations import WorkerProcess
from torchtitan_rl.health.diagnosis import examine
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.train.controller import Controller

_STOPPED_S, _GOING_S = 0.3, 0.1
_SILENT_S = 70.0


async def with_replicas(directory: Path, name: str, steps: int) -> None:
    """A run with two replicas of which one is killed (`dead_replica`) or stopped three quarters of the time."""
    config = quickstart(directory, "warm", steps)
    config.output_dir, config.generator.num_replicas = str(directory / f"actors-{name}"), 2
    shutil.rmtree(config.output_dir, ignore_errors=True)
    async with await Controller.launch(config) as controller:
        run = asyncio.ensure_future(controller.train())
        while controller.state.step < 3:
            await asyncio.sleep(0.05)
        (pid,) = await controller.generator._replicas[1].mesh.call_each(WorkerProcess.pid)
        if name.startswith("dead"):
            os.kill(pid, signal.SIGKILL)
        while not run.done() and name.startswith("slow"):
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(_STOPPED_S * random.uniform(0.8, 1.2))
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(_GOING_S)
        await run


async def hangs_forever(task, completions):
    """A reward that never answers from the 120th group on."""
    _TASK_IDS.append(task.id)
    await asyncio.sleep(10_000.0 if len(_TASK_IDS) > 120 else 0.0)
    return [float(text == task.answer) for text in completions]


_TASK_IDS: list[str] = []


async def hanging(directory: Path) -> None:
    config = quickstart(directory, "warm", 20)
    config.output_dir, config.task.reward = str(directory / "actors-gone-killed"), hangs_forever
    config.controller.reward_timeout_s = 100_000.0
    await trained(config, backend="actors")


def hung(directory: Path) -> None:
    """A run whose reward hangs: what is said while it hangs, and a kill."""
    shutil.rmtree(directory / "actors-gone-killed", ignore_errors=True)
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.diagnose_faults_actors", "hanging", str(directory)])
    metrics = directory / "actors-gone-killed" / "metrics.jsonl"
    while not metrics.exists() or time.time() - metrics.stat().st_mtime < _SILENT_S or not metrics.stat().st_size:
        time.sleep(1.0)
    findings = [finding.as_data() for finding in examine(Run.open(metrics.parent)).findings]
    child.kill()  # its processes end with it
    child.wait()
    hung_run = directory / "actors-stall-hung"
    shutil.rmtree(hung_run, ignore_errors=True)
    hung_run.mkdir()
    (hung_run / "said.json").write_text(json.dumps(findings, indent=1))


def main() -> int:
    fault, place = sys.argv[1], Path(sys.argv[2]).absolute()
    if fault == "hung":
        hung(place)
    elif fault == "hanging":
        asyncio.run(hanging(place))
    else:
        name, steps = {"killed": ("dead_replica-killed", 30), "slowed": ("slow_replica-slowed", 20)}[fault]
        asyncio.run(with_replicas(place, name, steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())

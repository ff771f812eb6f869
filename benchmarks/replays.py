"""Runs at lag 2 with slow rewards and replicas that stop, are killed, join and leave: each is audited, replayed, and
compared to the last bit.

    .venv/bin/python -m benchmarks.replays [--seeds 0 1 2] [--local 3] [--steps 8] [--scale] [--middle]
        [--output-dir DIR]

Every run is a short one of the quickstart's model. What happens to it is drawn with the seed: the order of batches, how
long a reward waits, which replicas stand still (SIGSTOP) or are killed (SIGKILL), and when. The first `--local` runs
have one replica, which is not killed, and are replayed in one process; the rest have two, and with `--scale` also one
to three in turn; 40 steps give replicas the time to join. With `--middle` completions are longer, runs write
checkpoints, and each is replayed from one of these, drawn with the seed, and not from its beginning. Prints a line per
run; exit status 1 where a replay is not the run, or an audit finds something. Then the same config is run once more by
itself and compared: a control, which is to differ.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks import replays
from torchtitan_rl.actors.operations import WorkerProcess
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.role_mesh import WorkerLost
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tasks.letter_sort import partial_credit
from torchtitan_rl.tools.audit import audit
from torchtitan_rl.tools.replay_differences import first_replay_difference
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import Task

ROOT = Path(__file__).parents[1]

_CLOCK = random.SystemRandom()
"""Not seeded: a run's rewards wait for times that no later run can know."""


async def slow(task: Task, completions: list[str]) -> list[float]:
    """The quickstart's reward, after a wait of up to 0.4 s."""
    await asyncio.sleep(_CLOCK.uniform(0.0, 0.4))
    return [partial_credit(completion, task.answer) for completion in completions]


def config(path: Path, seed: int, *, replicas: int, steps: int, draw: random.Random) -> RunConfig:
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir, config.seed = str(path), seed
    config.task.reward = replays.slow  # by the name under which a replay imports it, not by __main__
    config.supervised.num_steps, config.supervised.batch_size = 2, 8
    config.algorithm.max_policy_lag = 2
    config.algorithm.batch_order = draw.choice(["finished", "slots"])
    config.algorithm.tasks_per_step, config.algorithm.group_size = 4, 4
    config.controller.num_steps, config.controller.eval_every = steps, 4
    config.controller.eval_tasks = config.controller.test_tasks = 8
    config.generator.num_replicas = replicas
    config.generator.max_replica_restarts = draw.choice([0, 3])
    config.record.diagnose = False
    return config


async def train(config: RunConfig, draw: random.Random, *, kill: bool, scale: bool = False) -> list[str]:
    """Trains, and meanwhile disturbs the replicas. Returns what was done to them."""
    done: list[str] = []
    async with await Controller.launch(config) as controller:
        tasks = [asyncio.ensure_future(disturb(controller, draw, done, kill=kill))]
        if scale:
            tasks.append(asyncio.ensure_future(rescale(controller, random.Random(draw.random()), done)))
        await controller.train()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return done


async def rescale(controller: Controller, draw: random.Random, done: list[str]) -> None:
    """Asks for other numbers of replicas, one after the other."""
    assert controller.replicas is not None
    while controller.state.phase != "reinforcement":
        await asyncio.sleep(0.05)
    while True:
        number = draw.choice([n for n in (1, 2, 3) if n != controller.replicas.number])
        try:
            await controller.replicas.scale(number)
            done.append(f"{number} replicas at step {controller.state.step}")
        except (RuntimeError, ValueError):  # one is lost, and not replaced yet
            await asyncio.sleep(1.0)
        await asyncio.sleep(draw.uniform(0.5, 4.0))


async def disturb(controller: Controller, draw: random.Random, done: list[str], *, kill: bool) -> None:
    steps, victim, generator = controller.config.controller.num_steps, draw.randrange(3), controller.generator
    assert isinstance(generator, MeshSamplingClient)
    for number, step in enumerate(sorted(draw.randrange(steps) for _ in range(3))):
        while controller.state.phase != "reinforcement" or controller.state.step < step:
            await asyncio.sleep(0.02)
        await asyncio.sleep(draw.uniform(0.0, 0.3))
        replica = draw.choice(generator._replicas)
        with suppress(WorkerLost, ProcessLookupError, TimeoutError):  # it was killed before, and starts again
            (pid,) = await asyncio.wait_for(replica.mesh.call_each(WorkerProcess.pid), 5.0)
            if kill and number == victim:
                os.kill(pid, signal.SIGKILL)
                done.append(f"{replica.mesh.role} killed at step {controller.state.step}")
                continue
            await stopped(pid, draw.uniform(0.3, 1.5))
            done.append(f"{replica.mesh.role} stopped at step {controller.state.step}")


async def stopped(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def replay(run: Path, *, backend: str, first: int = 0) -> tuple[bool, str]:
    """(whether the replay is the run, what `--verify` said). It begins after step `first`."""
    command = [sys.executable, "-m", "torchtitan_rl.cli", "replay", str(run), "--verify", "--backend", backend]
    command += ["--output-dir", f"{run}-replay", "--from", str(first)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    lines = [line for line in (ended.stdout + ended.stderr).splitlines() if line.startswith(("the same", "differs"))]
    return ended.returncode == 0 and bool(lines), lines[-1] if lines else ended.stderr[-2000:]


def once_more(run: Path, config: RunConfig) -> str:
    """Runs a config again, not by its schedule, and returns where the two runs part."""
    config.output_dir = f"{run}-again"
    asyncio.run(train(config, random.Random(0), kill=False))
    difference = first_replay_difference(
        RunDir(run), 1, RunDir(Path(config.output_dir)), first=0, last=config.controller.num_steps
    )
    return "the same" if difference is None else str(difference)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(20)))
    parser.add_argument("--local", type=int, default=3, help="runs that are replayed in one process")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--scale", action="store_true", help="replicas join and leave, too")
    parser.add_argument("--middle", action="store_true", help="replayed from a checkpoint")
    parser.add_argument("--output-dir", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root, failed = args.output_dir or Path(temporary), 0
        for number, seed in enumerate(args.seeds):
            local, draw, path, start = number < args.local, random.Random(seed), root / str(seed), time.monotonic()
            run_config = config(path, seed, replicas=1 if local else 2, steps=args.steps, draw=draw)
            if args.scale and not local:
                run_config.generator.max_replica_restarts = 3  # the only replica may be the one that is killed
            first = 0
            if args.middle:
                run_config.controller.checkpoint_every, run_config.controller.keep_last = 2, args.steps
                run_config.sampling.max_tokens = 48
                first = draw.randrange(2, args.steps, 2)
            done = asyncio.run(train(run_config, draw, kill=not local, scale=args.scale and not local))
            _, problems = audit(RunDir(path))
            same, verdict = replay(path, backend="local" if local else "actors", first=first)
            failed += not same or bool(problems)
            print(
                f"seed {seed}, {run_config.algorithm.batch_order}, {'local' if local else 'actors'}, from {first}: "
                f"{verdict}; audit: {problems[0] if problems else 'clean'}; "
                f"{', '.join(done)}; {time.monotonic() - start:.0f} s",
                flush=True,
            )
        print(f"{len(args.seeds) - failed} of {len(args.seeds)}: audit clean, and the replay is the run", flush=True)
        print(f"control, run again without its schedule: {once_more(path, run_config)}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

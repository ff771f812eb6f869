"""Steps per minute with batches generated ahead, against generation and training in turns, in one invocation.

    .venv/bin/python benchmarks/overlap.py [--lags 0 1] [--work plain|rewards|long|turns|throttled] [--tasks 16]
                                        [--blocks 5] [--steps 6] [--threads 2 1] [--nice 5]

A Qwen3 of 3.2M random parameters, 16 tasks of 8 rollouts, completions that end by chance (mean 64 tokens) or at 256
tokens. Every lag has processes of its own, as a run at that lag starts them. Blocks of steps alternate between the
lags, and the processes of the others wait. The first steps of a block, which wait for a batch whatever the lag, do not
count. `rewards`: every reward waits 1 s. `long`: completions end by chance after 24 tokens, and one in 128 is 240 long.
`turns`: 8 turns of at most 24 tokens; each answer of the environment takes 20 to 400 ms. `throttled`: 16
tokens at most, and a sleep makes generation and training take 2 s each. Prints one line of JSON: seconds per step by
lag and processor seconds of all processes, the mean of a block's steps and the median over blocks, and the ratios to
the first lag.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

import torchtitan_rl.config as rl
from torchtitan_rl import Controller
from torchtitan_rl.algorithm import presets
from torchtitan_rl.config.load import load_config

ROOT = Path(__file__).parents[1]
SHAPE = rl.Qwen3Shape(
    vocab_size=64, dim=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, hidden_dim=768, max_seq_len=512
)


async def slow_reward(task, completions):
    await asyncio.sleep(1.0)
    return [float(len(completion) % 2) for completion in completions]


def reward(task, completions):
    return [float(len(completion) % 2) for completion in completions]


async def one_long(task, policy, *, rollout_id, seed):
    """A completion whose length is drawn: 240 tokens once in 128, else around 24."""
    from torchtitan_rl.types import Rollout, Turn

    tokens = policy.prompt_tokens(task)
    length = 240 if seed % 128 == 0 else 12 + seed % 25
    completion = await policy.complete(tokens, seed=seed, max_tokens=length, stop_token_ids=[])
    return Rollout(
        id=rollout_id,
        task=task,
        turns=[Turn(prompt_tokens=tokens, completion=completion)],
        text=policy.text(completion),
    )


async def eight_turns(task, policy, *, rollout_id, seed):
    """Eight turns in an environment whose answers take 20 to 400 ms."""
    from torchtitan_rl.types import Rollout, Turn

    tokens, turns, delay = policy.prompt_tokens(task), [], random.Random(seed)
    for turn in range(8):
        completion = await policy.complete(tokens, seed=seed + turn, max_tokens=24)
        turns.append(Turn(prompt_tokens=tokens, completion=completion))
        await asyncio.sleep(delay.uniform(0.02, 0.4))
        tokens = tokens + completion.tokens + [20, 31, 27]
    return Rollout(id=rollout_id, task=task, turns=turns, text=policy.text(completion))


WORKFLOWS = {"long": one_long, "turns": eight_turns}


def benchmark_config(work: str, tasks: int, threads: tuple[int, int], nice: int | None, directory: str) -> rl.RunConfig:
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir, config.model.shape = directory, SHAPE
    config.supervised.num_steps = config.controller.eval_every = config.controller.checkpoint_every = 0
    config.controller.record_tokens = False
    config.algorithm = presets.asynchronous(tasks_per_step=tasks, group_size=8, max_policy_lag=0)
    config.algorithm.recompute_logprobs_per_batch, config.algorithm.correction_fn = False, None
    config.algorithm.correction_config = {}
    config.sampling.max_tokens, config.generator.max_model_len = 16 if work == "throttled" else 256, 512
    config.trainer.training.seq_len, config.trainer.optimizer.lr = 512, 1e-6
    config.trainer.num_threads, config.generator.num_threads = threads
    config.trainer.nice = nice
    config.task.reward = slow_reward if work == "rewards" else reward
    if work in WORKFLOWS:
        config.algorithm.workflow = WORKFLOWS[work]
    return config


class PerStep(NamedTuple):
    seconds: float
    processor_seconds: float
    """Of this process and all that it started: at most the seconds times the cores."""


async def block(controller: Controller, steps: int, work: str) -> PerStep:
    """What a step takes on average of `steps` steps, after the steps that fill the pipeline: one more than the lag."""
    lag = controller.config.algorithm.max_policy_lag
    if work == "throttled":
        controller.batches._play = partial(_throttled, controller.player.play)
    ends: list[tuple[float, float]] = []
    for _ in range(lag + 1 + steps):
        batch = await controller.batches.next_batch()
        training = time.perf_counter()
        await controller.train_on(batch.groups, batch.sampled)
        if work == "throttled":
            await asyncio.sleep(max(0.0, 2.0 - (time.perf_counter() - training)))
        await controller.publish()
        ends.append((time.perf_counter(), processor_seconds()))
    await controller.batches.cancel()
    # No median of the steps: with a lag, long and short ones alternate.
    return PerStep(*((last - first) / steps for first, last in zip(ends[lag], ends[-1])))


def processor_seconds() -> float:
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(time.user + time.system for time in times)


async def _throttled(play, draws, counts):
    began = time.perf_counter()
    groups = await play(draws, counts)
    await asyncio.sleep(max(0.0, 2.0 - (time.perf_counter() - began)))
    return groups


async def measure(args) -> dict[int, list[PerStep]]:
    blocks: dict[int, list[PerStep]] = {lag: [] for lag in args.lags}
    controllers: dict[int, Controller] = {}
    with tempfile.TemporaryDirectory() as directory:
        async with AsyncExitStack() as stack:
            for lag in args.lags:
                config = benchmark_config(args.work, args.tasks, tuple(args.threads), args.nice, f"{directory}/{lag}")
                config.controller.num_steps, config.algorithm.max_policy_lag = 10**6, lag
                controllers[lag] = await stack.enter_async_context(await Controller.launch(config))
            for _ in range(args.blocks):
                for lag in args.lags:
                    blocks[lag].append(await block(controllers[lag], args.steps, args.work))
    return blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--work", choices=("plain", "rewards", "long", "turns", "throttled"), default="plain")
    parser.add_argument("--tasks", type=int, default=16, help="tasks of a step, 8 rollouts each")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--threads", type=int, nargs=2, default=(0, 0), help="of trainer and generator; 0: as runs share cores"
    )
    parser.add_argument("--nice", type=int, help="trainer.nice")
    args = parser.parse_args()
    blocks = asyncio.run(measure(args))
    first = blocks[args.lags[0]]
    line = {
        "work": args.work,
        "tasks": args.tasks,
        "threads": list(args.threads),
        "seconds_per_step": {lag: round(median(one.seconds for one in ours), 3) for lag, ours in blocks.items()},
        "processor_seconds_per_step": {
            lag: round(median(one.processor_seconds for one in ours), 3) for lag, ours in blocks.items()
        },
        "ratio": {
            lag: round(median(a.seconds / b.seconds for a, b in zip(first, ours)), 3) for lag, ours in blocks.items()
        },
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()

"""Tokens per second of a run whose second replica has joined, beside one that started with two.

    .venv/bin/python -m benchmarks.joined_throughput [--repeats 10] [--num-threads 1]

Two controllers of the quickstart with random weights, each with its own actors: one starts with two replicas, the other
with one, and `scale` makes them two. Five seconds after the second replica has joined, both sample the same batches in
turn, and the one which waits takes no processor time. Prints one line of JSON: medians of tokens per second, and the
median ratio of a pair with its 95% bootstrap interval. The bar is that the ratio is at least 0.9.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median

from torchtitan_rl import Controller
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.tools.bench.measurement import interval

ROOT = Path(__file__).parents[1]
REPLICAS, WAIT_S = 2, 5.0
NUM_ROLLOUTS = 128


def run_config(directory: str, num_replicas: int, num_threads: int) -> RunConfig:
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir, config.supervised.num_steps, config.controller.checkpoint_every = directory, 0, 0
    config.sampling.max_tokens, config.generator.max_model_len = 48, 64
    config.generator.num_replicas, config.generator.num_spares = num_replicas, 0
    config.generator.max_num_seqs, config.generator.num_threads = NUM_ROLLOUTS, num_threads
    return config


async def tokens_per_second(controller: Controller) -> float:
    draws = controller.draws.next(NUM_ROLLOUTS // controller.config.algorithm.group_size)
    began = time.perf_counter()
    groups = await controller.rollouts(draws)
    seconds = time.perf_counter() - began
    return sum(len(t.completion.tokens) for group in groups for r in group.rollouts for t in r.turns) / seconds


async def measure(directory: str, repeats: int, num_threads: int) -> tuple[list[float], list[float]]:
    """(the run's that started with two, the run's that a second one joined), a number for each repeat."""
    async with (
        await Controller.launch(run_config(f"{directory}/started", REPLICAS, num_threads)) as started,
        await Controller.launch(run_config(f"{directory}/joined", 1, num_threads)) as joined,
    ):
        await tokens_per_second(started), await tokens_per_second(joined)
        assert joined.replicas is not None
        await joined.replicas.scale(REPLICAS)
        await asyncio.sleep(WAIT_S)
        rates: tuple[list[float], list[float]] = [], []
        for repeat in range(repeats):
            for side in (0, 1) if repeat % 2 else (1, 0):
                rates[side].append(await tokens_per_second((started, joined)[side]))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--num-threads", type=int, default=1, help="of each replica")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        started, joined = asyncio.run(measure(directory, args.repeats, args.num_threads))
    ratios = [after / before for before, after in zip(started, joined, strict=True)]
    low, high = interval(ratios)
    print(
        json.dumps(
            {
                "started_with_two": round(median(started)),
                "second_joined": round(median(joined)),
                "ratio": [round(number, 3) for number in (median(ratios), low, high)],
            }
        )
    )


if __name__ == "__main__":
    main()

"""What a rollout in flight costs the controller: its processor time per sampled token, with few and with many of them.

    .venv/bin/python benchmarks/in_flight.py [--rollouts 64 256 1024] [--blocks 5] [--max-tokens 32]

The quickstart's model with random weights, tasks of 8 rollouts, at most `--max-tokens` tokens a completion. A block
plays one batch of each size; the first block does not count. All threads of the controller's process count; trainer,
generator and store are processes of their own. Prints one line of JSON: microseconds per token by number of rollouts,
medians over blocks, and the ratio of the last to the first.
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

ROOT = Path(__file__).parents[1]


async def measure(sizes: list[int], blocks: int, max_tokens: int, directory: str) -> dict[int, list[float]]:
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir, config.supervised.num_steps, config.controller.checkpoint_every = directory, 0, 0
    config.sampling.max_tokens, config.generator.max_model_len = max_tokens, 64
    config.generator.max_num_seqs = max(sizes)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    async with await Controller.launch(config) as controller:
        for block in range(blocks + 1):
            for size in sizes:
                draws = controller.draws.next(size // config.algorithm.group_size)
                began = time.process_time()
                groups = await controller.rollouts(draws)
                used = time.process_time() - began
                tokens = sum(len(t.completion.tokens) for g in groups for r in g.rollouts for t in r.turns)
                if block:
                    seconds[size].append(used / tokens)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        seconds = asyncio.run(measure(args.rollouts, args.blocks, args.max_tokens, f"{directory}/run"))
    middle = {size: round(median(size_seconds) * 1e6, 1) for size, size_seconds in seconds.items()}
    ratio = round(middle[args.rollouts[-1]] / middle[args.rollouts[0]], 3)
    print(json.dumps({"microseconds_per_token": middle, "ratio": ratio}))


if __name__ == "__main__":
    main()

"""How far trainer and generator in bfloat16 are apart, with `model.float32_head` and without.

    .venv/bin/python -m benchmarks.float32_head [--supervised-steps 0 300] [--seeds 0 1 2]

The quickstart's model after so many steps of its warm start, trainer and generator in bfloat16 in this process. Each
run samples a batch of the quickstart with its own generator and scores it with its own trainer. Prints a line of JSON
for each run: tokens, `mismatch/kl` and the largest difference of a log-probability.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.load import load_config
from torchtitan_rl.train.controller import Controller

_CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.py"


async def measure(supervised_steps: int, seed: int, *, float32_head: bool) -> dict:
    config = load_config(str(_CONFIG))
    config.seed, config.supervised.num_steps, config.model.float32_head = seed, supervised_steps, float32_head
    config.generator.dtype = config.trainer.training.mixed_precision_param = "bfloat16"
    config.controller.call_timeout_s = config.controller.sample_timeout_s = 3600
    with tempfile.TemporaryDirectory() as directory:
        config.output_dir = f"{directory}/run"
        async with await Controller.launch(config, backend="local") as controller:
            await controller.supervise()
            await controller.publish()
            groups = (await controller.batches.next_batch()).groups
            data = to_datums(groups, config.algorithm)
            output = await controller.trainer.forward_backward(data, importance_sampling)
    return {
        "supervised_steps": supervised_steps,
        "seed": seed,
        "float32_head": float32_head,
        "tokens": output.num_tokens,
        "kl": output.metrics["mismatch/kl"],
        "logprob_diff_max": output.metrics["mismatch/logprob_diff_max"],
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--supervised-steps", type=int, nargs="+", default=[0, 300])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for steps in args.supervised_steps:
        for seed in args.seeds:
            for float32_head in (False, True):
                print(json.dumps(await measure(steps, seed, float32_head=float32_head)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

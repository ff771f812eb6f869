"""How far trainer and generator of a mixture are apart, with the generator's experts in the trainer and without.

    .venv/bin/python -m benchmarks.expert_routing [--trainer-dtype bfloat16] [--noise 0 0.03] [--trainer-ranks 1]

The debug mixture (configs/moe_debug.py) after its warm start: a generator in bfloat16 on two tensor-parallel ranks, a
trainer with expert parallelism over its ranks. The same completions are scored by the trainer as its own routers
choose, compared with the generator's experts, and with these replayed. With `--noise` the generators get routers that
differ from the trainer's: normal noise of so many standard deviations of each router's weights, in place of the
difference that kernels or quantised weights make. Prints a line of JSON for each noise.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file, save_file

from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.load import load_config
from torchtitan_rl.train.controller import Controller

_CONFIG = Path(__file__).parents[1] / "configs" / "moe_debug.py"
_MODES: tuple[Literal["own", "compare", "replay"], ...] = ("own", "compare", "replay")


def with_noise(directory: Path, noise: float) -> None:
    """Adds noise to the routers of a Hugging Face directory."""
    file, draw = directory / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=draw)
    save_file(tensors, file, metadata={"format": "pt"})


async def measure(controller: Controller, noise: float, directory: Path) -> dict:
    await controller.publish()
    if noise:
        await controller.trainer.save_hf_model(directory, eos=1, pad=0)
        with_noise(directory, noise)
        await controller.generator.load_hf(str(directory), version=controller.policy_version)
    groups = (await controller.batches.next_batch()).groups
    line: dict = {"noise": noise, "seed": controller.config.seed}
    for mode in _MODES:
        data = to_datums(groups, dataclasses.replace(controller.config.algorithm, expert_routing=mode))
        output = await controller.trainer.forward_backward(data, importance_sampling)
        line[mode] = {name: value for name, value in output.metrics.items() if name.startswith("mismatch/")}
    line["tokens"] = output.num_tokens
    line["ratio"] = line["own"]["mismatch/kl"] / line["replay"]["mismatch/kl"]
    return line


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer-dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--float32-head", action="store_true", help="logits in float32 in trainer and generator")
    parser.add_argument("--noise", type=float, nargs="*", default=[0.0])
    parser.add_argument("--tasks", type=int, default=64)
    parser.add_argument("--supervised-steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trainer-ranks", type=int, default=2)
    parser.add_argument("--generator-ranks", type=int, default=2, help="1: everything in this process")
    args = parser.parse_args()
    config = load_config(str(_CONFIG))
    config.supervised.num_steps, config.algorithm.tasks_per_step = args.supervised_steps, args.tasks
    config.algorithm.expert_routing, config.seed = "replay", args.seed
    config.model.float32_head = args.float32_head
    config.generator.dtype, config.generator.tensor_parallel_degree = "bfloat16", args.generator_ranks
    config.controller.reward_timeout_s = config.controller.hang_timeout_s = config.generator.hang_timeout_s = 3600
    config.controller.start_timeout_s = config.controller.call_timeout_s = config.controller.sample_timeout_s = 3600
    parallel = config.trainer.parallelism
    parallel.data_parallel_shard_degree = parallel.expert_parallel_degree = args.trainer_ranks
    alone = args.generator_ranks == args.trainer_ranks == 1
    config.trainer.training.mixed_precision_param = args.trainer_dtype
    with tempfile.TemporaryDirectory() as directory:
        config.output_dir = f"{directory}/run"
        async with await Controller.launch(config, backend="local" if alone else "actors") as controller:
            await controller.supervise()
            for noise in args.noise:
                print(json.dumps(await measure(controller, noise, Path(directory) / "weights")), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

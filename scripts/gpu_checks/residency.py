"""Whether what leaves a device frees it, measured from outside: the trainer's offload and vLLM's sleep."""

from __future__ import annotations

import argparse
import asyncio

from scripts.gpu_checks.configs import STEPS, steps
from scripts.gpu_checks.device import gpus
from scripts.gpu_checks.result import Result, run_check
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.types import OptimParams, SamplingParams

MIN_FREED = 0.9  # of what left; allocators round, and what kernels need stays


def used_bytes() -> int:
    """Device memory in use on all GPUs together, whoever uses it."""
    return sum(int(gpu["memory.used"]) for gpu in gpus()) * 2**20


async def measure(result: Result, config: RunConfig) -> None:
    from tests.integration.helpers import random_datums
    from torchtitan_rl.train.controller import Controller

    shape = resolve_shape(config.model)
    config.output_dir = result.run_directory()
    async with await Controller.launch(config) as controller:
        data, used_with = random_datums(16), {}

        async def sample():
            await controller.generator.sample([20, 31, 27], SamplingParams(max_tokens=4, seed=0))

        await sample()
        await controller.trainer.forward_backward(data, importance_sampling)
        await controller.trainer.optim_step(OptimParams(lr=0.0))  # makes the optimizer's state
        await controller.trainer.forward_backward(data, importance_sampling)
        (resident,) = await controller.trainer.residency()
        used_with["trainer"] = used_bytes()
        await controller.placement.evict("policy")
        used_with["nobody"] = used_bytes()
        await sample()
        used_with["generator"] = used_bytes()
        await controller.trainer.forward(data)
        used_with["model alone"] = used_bytes()
    result.note(used_gib={name: round(size / 2**30, 2) for name, size in used_with.items()}, resident_bytes=resident)
    expected = {
        "trainer": resident["model"] + resident["gradients"],
        "generator": 2 * shape.num_parameters + int(config.generator.kv_cache_gib * 2**30),
        "model alone": resident["model"],
    }
    for name, size in expected.items():
        freed = used_with[name] - used_with["nobody"]
        result.require(
            freed >= MIN_FREED * size,
            f"{name}: frees {freed / 2**30:.2f} GiB when it leaves the device, and has {size / 2**30:.2f} GiB there",
        )


def check(result: Result, args: argparse.Namespace) -> None:
    """Lets trainer and generator take turns on one device and compares what is in use with nobody there."""
    asyncio.run(measure(result, steps(**STEPS["colocated-eager"], tiny=args.tiny)))


if __name__ == "__main__":
    run_check(check)

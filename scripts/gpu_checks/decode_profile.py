"""Which kernels a decode step of the engine spends its time in, and how long the device waits for the host between."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_checks.configs import sized_model
from scripts.gpu_checks.engine_ladder import Shape, requests_of
from scripts.gpu_checks.engines import random_weights, runner_of, started, untrained_dir
from scripts.gpu_checks.result import Result, run_check
from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.model.shape import resolve_shape

SHAPES, TINY_SHAPES = [Shape(64, 512, 64), Shape(256, 16, 64)], [Shape(4, 16, 8)]
NUM_KERNELS = 24
"""Kernels that are listed, those of the longest time."""


def kernels_of(profile: torch.profiler.profile, num_steps: int) -> tuple[list[dict[str, Any]], float]:
    """The kernels of a profile, the longest first, with their calls and microseconds in one of `num_steps` steps; and
    the milliseconds of all of them. On a CPU the operators stand for kernels."""
    attribute = "self_device_time_total" if platform.device_type() == "cuda" else "self_cpu_time_total"
    events = [(getattr(event, attribute), event) for event in profile.key_averages()]
    events.sort(key=lambda pair: -pair[0])
    rows = [
        {"kernel": event.key[:90], "calls": round(event.count / num_steps, 2), "us": round(us / num_steps, 1)}
        for us, event in events[:NUM_KERNELS]
        if us > 0
    ]
    return rows, sum(us for us, _ in events) / num_steps / 1000


def check(result: Result, args: argparse.Namespace) -> None:
    """Profiles rounds of requests that begin together. A round's first step reads the prompts; its time is shared by
    the steps, whose number is that of a completion's tokens."""
    on_gpu = platform.device_type() == "cuda"
    model = sized_model(args.tiny)
    config = GeneratorConfig(dtype="bfloat16", max_model_len=1024, kv_cache_gib=0.25 if args.tiny else 8.0)
    activities = [torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU]
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the engine has one of its own
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        with started(config, untrained_dir(Path(directory), model)) as engine:
            result.note(runner=runner_of(engine))
            engine.stage(0, random_weights(model, config.dtype))
            engine.load(0).result()
            for shape in TINY_SHAPES if args.tiny else SHAPES:
                for round_number in range(2):  # the first compiles, allocates and fills tables
                    requests = requests_of(shape, round_number, resolve_shape(model).vocab_size)
                    start = time.perf_counter()
                    for future in engine.submit(requests):
                        future.result()
                    unprofiled_ms = (time.perf_counter() - start) / shape.output * 1000
                requests = requests_of(shape, 2, resolve_shape(model).vocab_size)
                with torch.profiler.profile(activities=activities, experimental_config=all_threads) as profile:
                    for future in engine.submit(requests):
                        future.result()
                rows, busy_ms = kernels_of(profile, shape.output)
                result.note(
                    **{
                        f"ms a step, {shape.name}": round(unprofiled_ms, 2),
                        f"ms of kernels, {shape.name}": round(busy_ms, 2),
                        f"kernels, {shape.name}": rows,
                    }
                )
                result.require(bool(rows), f"kernels, {shape.name}: the profiler has seen none")


if __name__ == "__main__":
    run_check(check)

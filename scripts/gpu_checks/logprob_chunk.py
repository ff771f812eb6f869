"""What a larger chunk of logits buys: seconds and peak memory of one microbatch by `trainer.logprob_chunk_mib`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist

from scripts.gpu_checks.configs import sized_model
from scripts.gpu_checks.result import Result, run_check
from torchtitan_rl import platform
from torchtitan_rl.actors.build import build_model
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.dispatch.microbatches import pack
from torchtitan_rl.model.train_step import accumulate_gradients
from torchtitan_rl.types import Datum, Microbatch

SIZES_MIB, TINY_SIZES_MIB = (128, 512, 2048), (1, 2)
REPEATS = 3


def trainer(chunk_mib: int) -> TrainerConfig:
    """One rank in bfloat16 with selective activation checkpointing."""
    config = TrainerConfig(logprob_chunk_mib=chunk_mib, activation_checkpoint="selective")
    config.training.mixed_precision_param = "bfloat16"
    return config


def microbatch(num_documents: int, length: int, vocab_size: int) -> Microbatch:
    """Packed documents of random tokens, every one of which is trained on."""
    generator = torch.Generator().manual_seed(0)
    every = torch.ones(length)
    data = []
    for _ in range(num_documents):
        tokens = torch.randint(vocab_size, (length + 1,), generator=generator)
        inputs = {
            "loss_mask": every,
            "token_weights": every / length,
            "advantages": every,
            "sampling_logprobs": -10 * every,
        }
        data.append(Datum(tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs=inputs))
    return pack(data)


def measure(chunk_mib: int, batch: Microbatch, tiny: bool) -> dict:
    """Seconds (the median of some, after a first that compiles and allocates), peak GiB, and the sum of the gradient's
    squares, which no size may change."""
    from torchtitan.distributed import ParallelDims

    config, device = trainer(chunk_mib), platform.local_device(0)
    dims = ParallelDims.from_config(config.parallelism, 1)
    dims.build_mesh()
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        model = build_model(
            config, sized_model(tiny), role="policy", seed=0, parallel_dims=dims, device=device, dump_dir=directory
        ).model
    seconds = []
    for _ in range(1 + REPEATS):
        model.zero_grad()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        accumulate_gradients(model, [batch], importance_sampling, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    gradients: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    squares = sum(float(gradient.full_tensor().double().square().sum()) for gradient in gradients)
    found = {"seconds": round(statistics.median(seconds[1:]), 4), "gradient_norm": squares**0.5}
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return found


def check(result: Result, args: argparse.Namespace) -> None:
    """Measures each size in turn. Fails when the gradient depends on it."""
    from torchtitan_rl.model.shape import resolve_shape

    vocab_size = resolve_shape(sized_model(args.tiny)).vocab_size
    batch = microbatch(*((2, 64) if args.tiny else (16, 1024)), vocab_size)
    platform.local_device(0)
    dist.init_process_group(platform.distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
    norms = {}
    for size in TINY_SIZES_MIB if args.tiny else SIZES_MIB:
        found = measure(size, batch, args.tiny)
        norms[size] = found["gradient_norm"]
        result.note(**{f"{size} MiB": found})
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    # bfloat16 products of other sizes round otherwise, each by up to 0.4%; thousands of them do not add up in a norm.
    spread = max(norms.values()) / min(norms.values()) - 1
    result.require(spread <= 1e-2, f"gradient norms={norms}: differ by {spread:.1%}, which no chunk size should change")


if __name__ == "__main__":
    run_check(check)

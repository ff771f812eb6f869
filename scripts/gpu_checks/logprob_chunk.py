"""What the head costs by `trainer.logprob_chunk_mib` and `trainer.logprob_kernels`: seconds and peak memory, of the
head alone and of one microbatch of a model."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from scripts.gpu_checks.configs import sized_model
from scripts.gpu_checks.result import Result, largest_of, run_check
from torchtitan_rl import platform
from torchtitan_rl.actors.build import build_model
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.dispatch.microbatches import pack
from torchtitan_rl.model.logprobs import chunked_logprobs
from torchtitan_rl.model.train_step import accumulate_gradients
from torchtitan_rl.types import Datum, Microbatch

SIZES_MIB, TINY_SIZES_MIB = (2048, 512, 128, 10_240), (1, 2)
"""At the last one all logits are one chunk, which the kernels keep for backward."""
HEAD, TINY_HEAD = (16_384, 1024, 151_936), (256, 64, 640)
"""Tokens, hidden size and vocabulary of the head alone."""
REPEATS = 3
LARGEST = 8
"""CUDA kernels of a row that are named, those that take longest."""


def trainer() -> TrainerConfig:
    """One rank in bfloat16 with selective activation checkpointing."""
    config = TrainerConfig(activation_checkpoint="selective")
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


def measure(run: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Seconds of a call (the median of some, after a first that compiles and allocates), and on a GPU peak GiB and
    milliseconds of the CUDA kernels that take longest."""
    seconds = []
    for _ in range(1 + REPEATS):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    row: dict[str, Any] = {"seconds": round(statistics.median(seconds[1:]), 5)}
    if device.type == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.self_device_time_total)[:LARGEST]
        row["kernel_ms"] = {
            f"{kernel.key[:60]} x{kernel.count}": round(kernel.self_device_time_total / 1000, 2) for kernel in kernels
        }
    return row


def product_flops(device: torch.device, size: int) -> float:
    """FLOP/s of a bfloat16 product of square matrices: what this GPU gives where nothing else limits it."""
    one, other = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    return 2 * size**3 / measure(lambda: one @ other, device)["seconds"]


def head_alone(chunk_mib: int, head: str, shape: tuple[int, int, int], flops: float, device: torch.device) -> dict:
    """Forward and backward of log-probabilities and entropies. `share_of_products`: the seconds that the three matrix
    products which nothing avoids (logits, both gradients) would take at `flops`, of those that everything took."""
    num_tokens, dim, vocab_size = shape
    generator = torch.Generator(device).manual_seed(0)
    hidden_TD = torch.randn(num_tokens, dim, generator=generator, device=device).to(torch.bfloat16).requires_grad_()
    weight_VD = torch.randn(vocab_size, dim, generator=generator, device=device).mul_(3 / dim**0.5).to(torch.bfloat16)
    weight_VD.requires_grad_()
    targets_T = torch.randint(vocab_size, (num_tokens,), generator=generator, device=device)
    weights_T = torch.randn(2, num_tokens, generator=generator, device=device)

    def run() -> None:
        hidden_TD.grad = weight_VD.grad = None
        outputs = chunked_logprobs(
            hidden_TD,
            weight_VD,
            targets_T,
            chunk_tokens=max(1, chunk_mib * 2**20 // (4 * vocab_size)),
            kernels=head == "kernel",
        )
        torch.autograd.backward(outputs, list(weights_T))

    row = measure(run, device)
    row["share_of_products"] = round(3 * 2 * num_tokens * dim * vocab_size / flops / row["seconds"], 3)
    squares = [float(leaf.grad.float().square().sum()) for leaf in (hidden_TD, weight_VD)]
    return row | {"gradient_norm": sum(squares) ** 0.5}


def in_a_model(chunk_mib: int, head: str, model: Any, batch: Microbatch, device: torch.device) -> dict:
    """Forward and backward of a microbatch by a model whose head has these settings."""
    model.lm_head.chunk_bytes, model.lm_head.kernels = chunk_mib * 2**20, head == "kernel"

    def run() -> None:
        model.zero_grad()
        accumulate_gradients(model, [batch], importance_sampling, device)

    row = measure(run, device)
    gradients: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
    squares = sum(float(gradient.full_tensor().double().square().sum()) for gradient in gradients)
    return row | {"gradient_norm": squares**0.5}


def rows(result: Result, name: str, tiny: bool, row: Callable[[int, str], dict]) -> None:
    """Measures each size with kernels, where the device has some, and without. A row is noted when it is there, and one
    that fails does not stop the next. The check fails when the gradient depends on the row."""
    heads = ("kernel", "plain") if torch.cuda.is_available() else ("plain",)
    norms = {}
    for size in TINY_SIZES_MIB if tiny else SIZES_MIB:
        for head in heads:
            key = f"{name}, {size} MiB, {head}"
            try:
                values = row(size, head)
            except Exception as error:
                traceback.print_exc()
                result.require(False, f"{key}: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}")
            else:
                norms[key] = values["gradient_norm"]
                result.note(**{key: {"chunk_mib": size, "head": head} | values})
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    # bfloat16 products of other sizes round otherwise, each by up to 0.4%; thousands of them do not add up in a norm.
    spread = largest_of(norms.values()) / min(norms.values()) - 1 if norms else 0.0
    result.require(spread <= 1e-2, f"gradient norms={norms}: differ by {spread:.1%}, which no row should change")


def check(result: Result, args: argparse.Namespace) -> None:
    """Measures the head alone, then in a model."""
    from torchtitan.distributed import ParallelDims

    from torchtitan_rl.model.shape import resolve_shape

    device = platform.local_device(0)
    flops = product_flops(device, 512 if args.tiny else 8192)
    result.note(product_tflops=round(flops / 1e12, 3))
    shape = TINY_HEAD if args.tiny else HEAD
    rows(result, "head", args.tiny, lambda size, head: head_alone(size, head, shape, flops, device))

    vocab_size = resolve_shape(sized_model(args.tiny)).vocab_size
    batch = microbatch(*((2, 64) if args.tiny else (16, 1024)), vocab_size)
    dist.init_process_group(platform.distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
    config = trainer()
    dims = ParallelDims.from_config(config.parallelism, 1)
    dims.build_mesh()
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
        model = build_model(
            config, sized_model(args.tiny), role="policy", seed=0, parallel_dims=dims, device=device, dump_dir=directory
        ).model
        rows(result, "model", args.tiny, lambda size, head: in_a_model(size, head, model, batch, device))


if __name__ == "__main__":
    run_check(check)

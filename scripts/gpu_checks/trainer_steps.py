"""What a whole training step costs: forward and backward, clip, optimizer, on one rank without actors or store."""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from scripts.gpu_checks.configs import sized_model
from scripts.gpu_checks.device import peak_bf16_flops
from scripts.gpu_checks.logprob_chunk import microbatch
from scripts.gpu_checks.result import Result, run_check
from torchtitan_rl import platform
from torchtitan_rl.actors.build import build_optimizers, cut_model
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.meshes import LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.model import lora
from torchtitan_rl.model.flops import training_flops
from torchtitan_rl.model.train_step import accumulate_gradients, clip_and_step
from torchtitan_rl.types import OptimParams

__all__ = ["Trainer", "join_process_group", "release", "trainer_config"]

REPEATS = 3
LENGTH, TINY_LENGTH = 1024, 32  # tokens of a document
PUBLISHED = {  # tokens per second of one H100
    ("0.6B", 16384, "full parameters"): 11_900,
    ("0.6B", 16384, "adapters"): 13_300,
    ("4B", 16384, "adapters"): 6_200,
}


@dataclass(frozen=True)
class Row:
    """One layout of a training step."""

    flavor: str
    tokens: int
    """Of one microbatch."""
    checkpoint: Any = "selective"
    dtype: Any = "bfloat16"
    compile: bool = False
    microbatches: int = 1
    adapters: bool = False

    @property
    def name(self) -> str:
        trained = "adapters" if self.adapters else "full parameters"
        compiled = ", compiled" if self.compile else ""
        return (
            f"{self.flavor}, {self.microbatches} x {self.tokens} tokens, {self.checkpoint}, {self.dtype}, "
            f"{trained}{compiled}"
        )

    @property
    def published(self) -> float | str:
        trained = "adapters" if self.adapters else "full parameters"
        return PUBLISHED.get((self.flavor, self.tokens, trained), "")


# The most instructive first. What compiles is last: it takes the longest to begin.
ROWS = [
    Row("0.6B", 16384),
    Row("0.6B", 16384, "none"),
    Row("0.6B", 32768),
    Row("0.6B", 16384, adapters=True),
    Row("1.7B", 16384),
    Row("0.6B", 16384, "full"),
    Row("4B", 16384, adapters=True),
    Row("0.6B", 8192),
    Row("0.6B", 16384, microbatches=2),
    Row("0.6B", 8192, "none"),
    Row("1.7B", 8192, "none"),
    Row("1.7B", 32768, "full"),
    Row("0.6B", 16384, dtype="float32"),
    Row("0.6B", 16384, compile=True),
    Row("0.6B", 16384, "none", compile=True),
    Row("1.7B", 16384, compile=True),
]
TINY_ROWS = [Row("tiny", 64), Row("tiny", 64, "none", microbatches=2), Row("tiny", 64, adapters=True)]


def trainer_config(row: Row, length: int) -> TrainerConfig:
    """One rank; no document is longer than `length` tokens."""
    config = TrainerConfig(activation_checkpoint=row.checkpoint, max_tokens_per_microbatch=row.tokens)
    config.training.mixed_precision_param, config.training.seq_len = row.dtype, length
    config.compile.enable, config.lora = row.compile, LoRAConfig(rank=16) if row.adapters else None
    config.optimizer.lr = 1e-6
    return config


class Trainer:
    """A model and its optimizer as a trainer rank builds them. Random weights are drawn on the device: `build_model`
    draws them on the host, which takes longer than the steps that are measured."""

    def __init__(self, config: TrainerConfig, model_config: ModelConfig, device: torch.device) -> None:
        from torchtitan.distributed import ParallelDims

        self.config, self.device = config, device
        dims = ParallelDims.from_config(config.parallelism, 1)
        dims.build_mesh()
        with tempfile.TemporaryDirectory(prefix="torchtitan-rl-") as directory:
            cut = cut_model(config, model_config, role="policy", parallel_dims=dims, dump_dir=directory)
        self.shape, self.model = cut.shape, cut.model
        torch.manual_seed(0)
        self.model.to_empty(device=device)
        with torch.no_grad():
            self.model.init_weights()
        self.model.train()
        if config.lora is not None:
            lora.require_frozen_base(self.model)
            lora.draw_adapters(self.model, 0)
        self.optimizers = build_optimizers(config, cut.spec, self.model, dims)

    def step(self, batches: list) -> tuple[float, float, float]:
        """Takes a whole step. Returns (seconds of forward and backward, seconds of clip and step, gradient norm)."""
        optimizer = self.config.optimizer
        params = OptimParams(
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=self.config.training.max_norm or float("inf"),
        )
        start = self._now()
        accumulate_gradients(self.model, batches, importance_sampling, self.device)
        middle = self._now()
        norm, _ = clip_and_step(
            list(self.model.parameters()), self.optimizers, params, 1 / len(batches), expert_parallel=False
        )
        return middle - start, self._now() - middle, norm

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def join_process_group() -> torch.device:
    """A process group of this process alone, which torchtitan's meshes need. Returns the device."""
    device = platform.local_device(0)
    dist.init_process_group(platform.distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
    return device


def release() -> None:
    """Gives back the device memory of what nobody refers to."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(row: Row, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Tokens per second (median of some steps, after one that compiles and allocates), the step's parts, and peak
    GiB."""
    length = TINY_LENGTH if tiny else LENGTH
    model = sized_model(True) if tiny else ModelConfig(assets="chars", flavor=row.flavor)
    start = time.perf_counter()
    trainer = Trainer(trainer_config(row, length), model, device)
    batch = microbatch(row.tokens // length, length, trainer.shape.vocab_size)
    built = time.perf_counter()
    trainer.step([batch] * row.microbatches)
    first_step_s = time.perf_counter() - built
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = [trainer.step([batch] * row.microbatches) for _ in range(REPEATS)]
    seconds = statistics.median(forward_backward + clip_step for forward_backward, clip_step, _ in steps)
    tokens, norm = row.tokens * row.microbatches, steps[-1][2]
    peak = peak_bf16_flops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    flops = training_flops(trainer.shape, [length] * (tokens // length), adapters=row.adapters)
    if not math.isfinite(norm):
        raise RuntimeError(f"gradient norm={norm}: is not finite")
    return {
        "layout": row.name,
        "tokens_per_s": round(tokens / seconds, 1),
        "published": row.published,
        "step_s": round(seconds, 4),
        "forward_backward_s": round(statistics.median(step[0] for step in steps), 4),
        "clip_step_s": round(statistics.median(step[1] for step in steps), 4),
        # Of the bfloat16 peak in every dtype.
        "mfu": round(flops / seconds / peak, 4) if peak else "",
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else "",
        "build_s": round(built - start, 1),
        "first_step_s": round(first_step_s, 1),
        "gradient_norm": float(f"{norm:.4g}"),
    }


def check(result: Result, args: argparse.Namespace) -> None:
    """Measures layouts until the budget is spent. Running out of memory is an answer; another error fails the check."""
    start, device = time.monotonic(), join_process_group()
    measured: list[dict[str, Any]] = []
    rows = TINY_ROWS if args.tiny else ROWS
    result.note(rows=measured, not_measured=[row.name for row in rows], out_of_memory=[])
    for number, row in enumerate(rows, start=1):
        if time.monotonic() - start > args.budget_s:
            break
        print(row.name, flush=True)
        if (measurement := result.attempt(row.name, partial(measure, row, device, args.tiny))) is not None:
            measured.append(measurement)
        result.note(rows=measured, not_measured=[row.name for row in rows[number:]])
        release()
    result.require(bool(measured), "rows: none was measured")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=check.__doc__)
    parser.add_argument("--budget-s", type=float, default=150.0, help="seconds after which no further layout begins")
    run_check(check, parser)

"""Tokens per second of several adapters over one base in one batch, beside the base alone.

    .venv/bin/python -m benchmarks.adapters [--size 32m] [--dtype float32] [--adapters 8] [--rank 16] [--repeats 10]

Both sides are an engine in a process of its own, with the same weights, prompts, lengths and seeds, and take turns. On
one side each request is answered by one of the adapters, in turn; they act on every linear layer. The third side
answers the same requests an adapter at a time, as an engine does that holds one version. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch

from torchtitan_rl import adapters, platform
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.tools.bench.measurement import Repeat
from torchtitan_rl.tools.bench.side import Once, OpenSide, in_turn, opened
from torchtitan_rl.tools.bench.workload import LENGTHS, SHAPES, Dtype, Lengths, Workload
from torchtitan_rl.types import Request, SamplingParams

BASE, TOGETHER, IN_TURN = "base alone", "adapters in one batch", "an adapter at a time"


@asynccontextmanager
async def engine_side(
    workload: Workload, model: Path, lora: LoRAConfig, num_adapters: int, *, at_a_time: int
) -> AsyncIterator[Once]:
    """An engine that answers each batch with `num_adapters` adapters, of which `at_a_time` are in it together; 0: with
    the base."""
    adapters.prepare_vllm(eager=True)
    from torchtitan_rl.engine.engine import Engine

    config = workload.generator()
    if num_adapters:
        config = dataclasses.replace(config, max_adapters=num_adapters, adapters=lora)
    engine = Engine(config, ModelConfig(assets=str(model), shape=workload.shape), 0, 0)
    engine.start()
    engine.ready.result(600)
    platform.set_threads(0)  # vLLM's worker has set another number
    draw = torch.Generator().manual_seed(0)
    drawn = {
        name: torch.empty(shape).normal_(0, 0.02, generator=draw).to(dtype)
        for name, (shape, dtype) in engine.parameter_specs.items()
    }
    if workload.shape.tie_embeddings:
        drawn["lm_head.weight"] = drawn["tok_embeddings.weight"]
    if not num_adapters:
        engine.stage(0, drawn)
        engine.load(0).result(600)
    for version in range(num_adapters):
        tensors = {
            name: torch.empty(shape).normal_(0, 0.02, generator=draw).to(dtype)
            for name, (shape, dtype) in engine.adapter_specs.items()
        }
        engine.stage_adapters(version, tensors, ("base", drawn))
        engine.load_adapters(version, version).result(600)

    async def once(lengths: Lengths, repeat: int) -> Repeat:
        requests = [
            Request(
                prompt,
                SamplingParams(max_tokens=length, ignore_eos=True, seed=seed),
                adapter=seed % num_adapters if num_adapters else None,
            )
            for seed, (prompt, length) in enumerate(
                zip(workload.prompts(repeat), workload.completion_lengths(lengths), strict=True)
            )
        ]
        batches = [requests]
        if num_adapters and at_a_time < num_adapters:
            batches = [[r for r in requests if r.adapter == version] for version in range(num_adapters)]
        start, amount = time.perf_counter(), 0
        for batch in batches:
            futures = engine.submit(batch)
            completions = await asyncio.gather(*map(asyncio.wrap_future, futures))
            amount += sum(len(completion.tokens) for completion in completions)
        return Repeat(seconds=time.perf_counter() - start, amount=amount)

    yield once
    engine.close()


def measure(size: str, dtype: Dtype, num_adapters: int, rank: int, repeats: int) -> list[dict]:
    """A row for each distribution of lengths."""
    workload = Workload(size=size, shape=SHAPES["qwen3"][size], dtype=dtype)
    lora = LoRAConfig(rank=rank, alpha=2.0 * rank)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        workload.write_model(model)
        sides: dict[str, OpenSide] = {
            BASE: partial(engine_side, workload, model, lora, 0, at_a_time=0),
            TOGETHER: partial(engine_side, workload, model, lora, num_adapters, at_a_time=num_adapters),
            IN_TURN: partial(engine_side, workload, model, lora, num_adapters, at_a_time=1),
        }
        with opened(sides, Path(scratch) / "logs") as processes:
            measured = in_turn(processes, LENGTHS, repeats, lambda note: print(note, flush=True))
    for lengths, of_sides in measured.items():
        rates = {name: median(r.amount / r.seconds for r in repeats) for name, repeats in of_sides.items()}
        rows.append(
            {"size": size, "dtype": dtype, "adapters": num_adapters, "rank": rank, "lengths": lengths}
            | {f"{name}, tokens/s": round(rate, 1) for name, rate in rates.items()}
            | {f"{name}, of the base": round(rates[name] / rates[BASE], 3) for name in (TOGETHER, IN_TURN)}
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="32m", choices=list(SHAPES["qwen3"]))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    for row in measure(args.size, args.dtype, args.adapters, args.rank, args.repeats):
        print(json.dumps(row))

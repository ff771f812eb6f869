"""Tokens per second of several adapters over one base in one batch, beside the base alone.

    .venv/bin/python -m benchmarks.adapters [--size 32m] [--dtype float32] [--adapters 8] [--rank 16] [--repeats 10]

Both sides are an engine in a process of its own, with the same weights, prompts, lengths and seeds, and take turns. On
one side each request is answered by one of the adapters, in turn; they act on every linear layer. The third side
answers the same requests an adapter at a time, as an engine does that holds one version. Prints one line of JSON for
each distribution of lengths.

    .venv/bin/python -m benchmarks.adapters --sync [--size 0.6b] [--dtype bfloat16] [--rank 16] [--repeats 5]

Seconds of a sync, from a trainer's process to a generator's, after an optimizer step each: of all weights with adapters
merged in, and of the adapters alone, whose first sync, which has the base, is not counted. One after the other.
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
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.config.meshes import LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.tools.bench.generation import CALL_S
from torchtitan_rl.tools.bench.measurement import Repeat
from torchtitan_rl.tools.bench.side import Once, OpenSide, in_turn, opened
from torchtitan_rl.tools.bench.workload import EOS, LENGTHS, SHAPES, Dtype, Lengths, Workload
from torchtitan_rl.types import Datum, Request, SamplingParams

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
    for lengths, measured_sides in measured.items():
        rates = {name: median(r.amount / r.seconds for r in repeats) for name, repeats in measured_sides.items()}
        rows.append(
            {"size": size, "dtype": dtype, "adapters": num_adapters, "rank": rank, "lengths": lengths}
            | {f"{name}, tokens/s": round(rate, 1) for name, rate in rates.items()}
            | {f"{name}, of the base": round(rates[name] / rates[BASE], 3) for name in (TOGETHER, IN_TURN)}
        )
    return rows


async def sync_seconds(workload: Workload, model: Path, lora: LoRAConfig, max_adapters: int, repeats: int) -> float:
    """The median of `repeats` syncs."""
    config = RunConfig(
        name="bench",
        task=None,
        model=ModelConfig(assets=str(model), shape=workload.shape, pretrained=True),
        trainer=TrainerConfig(lora=lora),
        generator=dataclasses.replace(workload.generator(), max_adapters=max_adapters, kv_cache_gib=0.25),
    )
    config.trainer.training.seq_len, config.generator.max_num_seqs = workload.context, 1
    if max_adapters:
        config.generator.adapters = lora
    launcher = ActorLauncher(log_dir=None, start_timeout_s=CALL_S, call_timeout_s=CALL_S)
    ones_T, seconds = torch.ones(4), []
    datum = Datum(
        tokens=torch.tensor([3, 4, 5, 6]),
        target_tokens=torch.tensor([4, 5, 6, 7]),
        loss_inputs={"loss_mask": ones_T, "token_weights": ones_T / 4},
    )
    try:
        stack = await launcher.start(config, model, eos=EOS)
        for _ in range(repeats + 1):
            await stack.roles["policy"].forward_backward([datum], cross_entropy)
            await stack.roles["policy"].optim_step()
            start = time.perf_counter()
            await stack.generator.push_and_pull()
            seconds.append(time.perf_counter() - start)
        stack.generator.close()
    finally:
        await launcher.stop()
    return median(seconds[1:])


def measure_sync(size: str, dtype: Dtype, rank: int, repeats: int) -> dict:
    workload = Workload(size=size, shape=SHAPES["qwen3"][size], dtype=dtype)
    lora = LoRAConfig(rank=rank, alpha=2.0 * rank)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        workload.write_model(model)
        merged, apart = (asyncio.run(sync_seconds(workload, model, lora, slots, repeats)) for slots in (0, 2))
    return {
        "size": size,
        "dtype": dtype,
        "rank": rank,
        "merged, s": round(merged, 4),
        "adapters alone, s": round(apart, 4),
        "ratio": round(apart / merged, 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="32m", choices=list(SHAPES["qwen3"]))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--sync", action="store_true")
    args = parser.parse_args()
    if args.sync:
        print(json.dumps(measure_sync(args.size, args.dtype, args.rank, args.repeats)))
        raise SystemExit
    for row in measure(args.size, args.dtype, args.adapters, args.rank, args.repeats):
        print(json.dumps(row))

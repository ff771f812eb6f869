"""The inside of benchmarks/weight_sync.py: starts trainer, generators and store on two hosts, and publishes and pulls.

Every event is a line of JSON after an `@`; the driver then waits for a line, so that the outside can count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import torchtitan_rl.config as rl
from tests.integration.helpers import random_datums
from torchtitan_rl.actors.operations import WorkerProcess
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.config.load import load_config
from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.launch.attach import attach
from torchtitan_rl.launch.backend import Stack
from torchtitan_rl.launch.choice import ActorBackend
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.types import OptimParams, SamplingParams

ROOT = Path(__file__).parents[1]
LAYOUTS: dict[str, dict[str, int]] = {
    "fsdp2": dict(shard=2),
    "fsdp2-tp2": dict(shard=2, generator_tp=2),
    "fsdp2-across": dict(shard=2, hosts=2, replicas=2),
    "hsdp2-across": dict(replicate=2, hosts=2, replicas=2),
}
"""Trainer ranks on host 0 and the generator on host 1, one rank or two; trainer ranks on both hosts with a replica on
each, sharded over the hosts or replicated."""


def config_of(layout: str, dim: int, layers: int, vocab_size: int, directory: str) -> rl.RunConfig:
    sizes = dict(shard=1, replicate=1, hosts=1, replicas=1, generator_tp=1) | LAYOUTS[layout]
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.output_dir = directory
    config.model = rl.ModelConfig(
        assets="chars",
        shape=rl.Qwen3Shape(
            vocab_size=vocab_size, dim=dim, n_layers=layers, n_heads=16, n_kv_heads=8, head_dim=64, hidden_dim=3 * dim,
            max_seq_len=512,
        ),
    )  # fmt: skip
    trainer, generator = config.trainer, config.generator
    trainer.num_hosts, trainer.num_threads, trainer.training.seq_len = sizes["hosts"], 1, 64
    trainer.parallelism.data_parallel_shard_degree = sizes["shard"]
    trainer.parallelism.data_parallel_replicate_degree = sizes["replicate"]
    generator.num_replicas, generator.num_threads = sizes["replicas"], 1
    generator.tensor_parallel_degree = sizes["generator_tp"]
    generator.dtype, generator.max_num_seqs, generator.max_model_len = "bfloat16", 8, 64
    config.weight_sync.transport = "store"
    return config


def tell(event: str, **fields: Any) -> None:
    print("@" + json.dumps({"event": event} | fields), flush=True)
    sys.stdin.readline()


class Sampling:
    """Requests that follow each other, four at a time; `tokens` that came back so far."""

    def __init__(self, stack: Stack) -> None:
        self.generator, self.tokens = stack.generator, 0
        self._tasks = [asyncio.ensure_future(self._forever(seed)) for seed in range(4)]

    async def _forever(self, seed: int) -> None:
        while True:
            params = SamplingParams(max_tokens=4, seed=seed, ignore_eos=True)
            self.tokens += len((await self.generator.sample([5] * 8, params)).tokens)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def drive(args: argparse.Namespace) -> None:
    actors = ActorBackend()
    config = actors.settle(config_of(args.layout, args.dim, args.layers, args.vocab_size, args.directory))
    hosts = actors.hosts_for(config, await attach(args.hosts.split(","), timeout_s=60), generators_only=False)
    launcher = actors.launcher(config, hosts, f"{args.directory}/logs")
    try:
        model_dir = Path(args.directory) / "model"
        shape = resolve_shape(config.model)
        write_model_dir(model_dir, shape, assets_dir(config.model), eos=1, pad=0)
        stack = await launcher.start(config, model_dir, eos=1)
        await step(stack)  # the optimizer's state exists from here on
        policy, generator = stack.roles["policy"], stack.generator
        assert isinstance(policy, MeshTrainingClient) and isinstance(generator, MeshSamplingClient)
        meshes = {"policy": policy._mesh} | {replica.mesh.role: replica.mesh for replica in generator._replicas}
        pids = {
            f"{name}-{rank}": (mesh.hosts[rank].rpartition(":")[0], pid)
            for name, mesh in meshes.items()
            for rank, pid in enumerate(await mesh.call_each(WorkerProcess.pid))
        }
        tell("started", pids=pids, num_bytes=2 * shape.num_parameters)
        for sync in range(args.syncs):
            await one_sync(stack, sync, sampling=sync >= args.syncs // 2)
    finally:
        await launcher.stop()
    tell("ended")


async def step(stack: Stack) -> None:
    await stack.roles["policy"].forward_backward(random_datums(2), cross_entropy)
    await stack.roles["policy"].optim_step(OptimParams(lr=1e-4))


async def one_sync(stack: Stack, sync: int, *, sampling: bool) -> None:
    if sync:
        await step(stack)
    busy = Sampling(stack) if sampling else None
    before = 0.0
    if busy is not None:  # tokens per second without a transfer
        await asyncio.sleep(2)
        start, tokens = time.monotonic(), busy.tokens
        await asyncio.sleep(5)
        before = (busy.tokens - tokens) / (time.monotonic() - start)
    await asyncio.to_thread(tell, "sync")
    start = time.monotonic()
    version = await stack.versions.publish()
    publish_s = time.monotonic() - start
    start, tokens = time.monotonic(), 0 if busy is None else busy.tokens
    await stack.generator.pull(version)
    pull_s = time.monotonic() - start
    during = 0.0 if busy is None else (busy.tokens - tokens) / pull_s
    stall_s = max(stack.generator.stalls())
    figures = dict(publish_s=publish_s, pull_s=pull_s, load_s=stall_s)
    if busy is not None:
        figures |= dict(tokens_per_s=before, tokens_per_s_during=during)
        await busy.stop()
    await asyncio.to_thread(tell, "synced", sync=sync, sampling=sampling, **figures)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("layout", "directory", "hosts"):
        parser.add_argument(f"--{name}")
    for name in ("dim", "layers", "vocab-size", "syncs"):
        parser.add_argument(f"--{name}", type=int)
    asyncio.run(drive(parser.parse_args()))


if __name__ == "__main__":
    main()

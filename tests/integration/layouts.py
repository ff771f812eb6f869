"""Trainer meshes of any layout without a generator: for tests of numbers and for benchmarks/numerics_table.py."""

import time
from contextlib import asynccontextmanager, contextmanager

import torch

from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.meshes import AdamWConfig, TrainerConfig, WeightSyncConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.types import Datum, OptimParams

# 67 rows of vocabulary do not divide by two: TP ranks hold 34 and 33.
MODEL = ModelConfig(
    assets="chars",
    shape=Qwen3Shape(
        vocab_size=67, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96, max_seq_len=64
    ),
)


def trainer_config(dp: int = 1, tp: int = 1, replicate: int = 1, **changes) -> TrainerConfig:
    """`dp` shards parameters, `replicate` repeats such groups; `changes` as in `training__mixed_precision_param`."""
    config = TrainerConfig(optimizer=AdamWConfig(lr=1e-3), num_threads=1)
    config.training.seq_len = 64
    config.parallelism.data_parallel_shard_degree = dp
    config.parallelism.data_parallel_replicate_degree = replicate
    config.parallelism.tensor_parallel_degree = tp
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = config
        for name in parents:
            target = getattr(target, name)
        setattr(target, last, value)
    return config


def a_launcher():
    from torchtitan_rl.launch.actors import ActorLauncher

    return ActorLauncher(log_dir=None, start_timeout_s=240, call_timeout_s=400)  # compiling takes long


@asynccontextmanager
async def trainer_mesh(config: TrainerConfig, model: ModelConfig = MODEL, *, own_teacher: bool = False, launcher=None):
    """A running mesh; the weights depend on the seed alone, not on the layout.

    `own_teacher`: it holds its own head as a teacher's, which has been through a store. A `launcher` that is given has
    one already; it runs on when the mesh ends.
    """
    own, launcher = launcher is None, launcher or a_launcher()
    try:
        mesh = await launcher.start_trainer(config, model, role="policy", seed=0)
        if own_teacher:
            if own:
                await launcher.start_store()
            await _hold_own_head(mesh, launcher.store)
        yield mesh
    finally:
        if own:
            await launcher.stop()
        else:
            await launcher._meshes.pop().stop("the tests have what they need of it")
            launcher.pids.clear()


async def _hold_own_head(mesh, store) -> None:
    trainer = client(mesh)
    versions = PolicyVersions(trainer, store, WeightSyncConfig(), torch.float32, one_host=True)
    await versions.copy_head(trainer, trainer)


@contextmanager
def local_trainers(loop, log_dir):
    """`start(config)` starts a trainer of one rank in this process; `own_teacher` as above."""
    from torchtitan_rl.launch.local import LocalLauncher

    launcher = LocalLauncher(log_dir=str(log_dir), start_timeout_s=60, call_timeout_s=60)

    async def start(config, own_teacher):
        mesh = await launcher.start_trainer(config, MODEL, role="policy", seed=0)
        if own_teacher:
            await _hold_own_head(mesh, launcher.store)
        return mesh

    try:
        yield lambda config, *, own_teacher=False: loop.run_until_complete(start(config, own_teacher))
    finally:
        loop.run_until_complete(launcher.stop())


def started(loop, config, **how):
    """A running mesh and how to stop it."""
    running = trainer_mesh(config, **how)
    mesh = loop.run_until_complete(running.__aenter__())
    return mesh, lambda: loop.run_until_complete(running.__aexit__(None, None, None))


def client(mesh, max_tokens: int = 10**6, model: ModelConfig = MODEL, **how) -> MeshTrainingClient:
    """A client is only a way to call a mesh; one for each microbatch budget costs nothing."""
    return MeshTrainingClient(
        mesh,
        max_tokens_per_microbatch=max_tokens,
        max_datum_tokens=64,
        temperature=1.0,
        vocab_size=model.shape.vocab_size,
        **how,
    )


def recorded_batches(num: int, num_datums: int = 12, max_len: int = 20) -> list[list[Datum]]:
    return [random_datums(num_datums, seed=100 + step, max_len=max_len) for step in range(num)]


async def replay(
    trainer: MeshTrainingClient, batches: list[list[Datum]]
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """One step a batch: what each parameter became minus what it was, and the seconds of each step."""
    before, seconds = await trainer.parameters(), []
    for data in batches:
        start = time.perf_counter()
        await trainer.forward_backward(data, importance_sampling)
        output = await trainer.optim_step(OptimParams(lr=1e-3))
        seconds.append(time.perf_counter() - start)
        assert not output.skipped
    after = await trainer.parameters()
    return {name: after[name] - before[name] for name in before}, seconds

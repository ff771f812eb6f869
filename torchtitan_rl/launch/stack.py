"""The meshes of a run and their clients: training roles, generators, policy versions."""

from __future__ import annotations

import asyncio
import dataclasses
from functools import partial
from pathlib import Path

import torch

from torchtitan_rl import platform
from torchtitan_rl.actors.operations import TrainerOperations
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import COLOCATION, RunConfig
from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.recorded_routes import RecordedRoutes
from torchtitan_rl.dispatch.repair import Repair
from torchtitan_rl.dispatch.shared_plan import prefix_cost
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.versions import OneVersion, PolicyVersions, transport_of
from torchtitan_rl.launch.backend import MeshLauncher, Stack
from torchtitan_rl.launch.replicas import Replicas
from torchtitan_rl.launch.threads import side_by_side
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.record.schedule import Schedules, followed_entries

__all__ = ["start_stack", "start_generators"]

_SLOTS_OF_A_REPLAY = 1 << 16
"""More than versions are loaded: the record says what goes into which slot when, and nothing here waits for one."""


async def start_stack(config: RunConfig, launcher: MeshLauncher, model_dir: Path) -> Stack:
    """Starts every mesh and the store. Roles that share devices start one after the other, everything else at once."""
    if config.algorithm.max_policy_lag and launcher.shares_cores and platform.device_type() == "cpu":
        config = side_by_side(config)
    colocation, trainers = config.roles.colocation, config.trainers()
    placement = None if colocation == "none" else Placement(colocation)
    sharing = COLOCATION[colocation]
    dtype, adapters_apart = getattr(torch, config.generator.dtype), config.generator.max_adapters > 0
    meshes: dict[str, list] = {}

    async def start(role: str) -> None:
        share = config.roles.share_with(role)
        if role == "store":
            await launcher.start_store()
        elif role == "generator":
            meshes[role] = await asyncio.gather(*_generators(config, launcher, model_dir, share))
        else:
            trainer, model = trainers[role]
            meshes[role] = [await launcher.start_trainer(trainer, model, role=role, seed=config.seed, share_with=share)]
            if role == "policy" and not adapters_apart:  # while generators start
                transport = transport_of(config.weight_sync, one_host=launcher.one_host)
                await meshes[role][0].call_all(TrainerOperations.reserve_weights, dtype, transport)
        if role in sharing:
            placement.add(role, meshes[role])
            await placement.evict(role)

    async def in_turn(roles: list[str]) -> None:
        for role in roles:
            await start(role)

    everything = [*trainers, "generator", "store"]
    shared = [role for role in everything if role in sharing]
    starts = [asyncio.ensure_future(in_turn(shared))]
    starts += [asyncio.ensure_future(start(role)) for role in everything if role not in sharing]
    try:
        await asyncio.gather(*starts)
    finally:
        for pending in starts:  # after a failure, the other meshes must not go on starting
            pending.cancel()
    roles: dict[str, TrainingClient] = {
        role: MeshTrainingClient(
            meshes[role][0],
            max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
            max_datum_tokens=trainer.training.seq_len,
            temperature=config.algorithm.temperature,
            vocab_size=resolve_shape(model).vocab_size,
            placement=placement,
            prefix_cost=prefix_cost(trainer, resolve_shape(model)),
        )
        for role, (trainer, model) in trainers.items()
    }
    versions = PolicyVersions(
        roles["policy"],
        launcher.store,
        config.weight_sync,
        dtype,
        one_host=launcher.one_host,
        adapters_apart=adapters_apart,
    )
    # A replacement would have no turn on shared devices.
    repair = None if "generator" in shared else launcher.repair(config.generator)
    schedules = launcher.schedules
    routes = None if schedules is None else _routes(schedules)
    follows = schedules is not None and bool(schedules.followed)
    generator = _sampling_client(config, meshes["generator"], versions, placement, repair, routes, follows=follows)
    replicas = None
    if launcher.takes_replicas and placement is None and routes is None:
        start_one = partial(_start_generator, config, launcher, model_dir)
        replicas = Replicas(generator, start=start_one, stop=launcher.stop_generator)
    return Stack(
        launcher=launcher, roles=roles, versions=versions, placement=placement, generator=generator, replicas=replicas
    )


async def start_generators(config: RunConfig, launcher: MeshLauncher, model_dir: Path) -> Stack:
    """Starts generators alone, which hold no weights yet: they get those of a directory, without adapters."""
    config = dataclasses.replace(config, generator=dataclasses.replace(config.generator, max_adapters=0))
    meshes = await asyncio.gather(*_generators(config, launcher, model_dir, None))
    generator = _sampling_client(config, meshes, OneVersion(), None, None, None, follows=False)
    return Stack(launcher=launcher, roles={}, generator=generator, versions=None, placement=None)


def _generators(config: RunConfig, launcher: MeshLauncher, model_dir: Path, share_with: str | None) -> list:
    roles = [f"generator-{i}" for i in range(config.generator.num_replicas)]
    return [_start_generator(config, launcher, model_dir, role, share_with=share_with) for role in roles]


def _start_generator(
    config: RunConfig,
    launcher: MeshLauncher,
    model_dir: Path,
    role: str,
    host: int | None = None,
    *,
    share_with: str | None = None,
):
    model = ModelConfig(
        assets=str(model_dir), shape=resolve_shape(config.model), float32_head=config.model.float32_head
    )
    return launcher.start_generator(
        config.generator, model, role=role, seed=config.seed, share_with=share_with, host=host
    )


def _routes(schedules: Schedules) -> RecordedRoutes | None:
    """Where the requests of a replay go; None where it follows no engine, or one, which gets every request."""
    files = schedules.followed.values()
    return RecordedRoutes([list(followed_entries(Path(file), schedules)) for file in files]) if len(files) > 1 else None


def _sampling_client(
    config: RunConfig,
    meshes,
    versions,
    placement: Placement | None,
    repair: Repair | None,
    routes: RecordedRoutes | None,
    *,
    follows: bool = False,
) -> MeshSamplingClient:
    """`follows`: the engines follow a record."""
    num_slots = config.generator.max_adapters
    if num_slots and follows:
        num_slots = _SLOTS_OF_A_REPLAY
    return MeshSamplingClient(
        list(meshes),
        versions,
        max_model_len=config.generator.max_model_len,
        timeout_s=config.controller.sample_timeout_s,
        verify=config.weight_sync.verify,
        placement=placement,
        repair=repair,
        routes=routes,
        num_adapter_slots=num_slots,
        follows=follows,
    )

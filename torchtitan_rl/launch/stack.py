"""Starts the meshes of a run and returns their clients: training roles, generators, policy versions."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchtitan_rl import platform
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.run import COLOCATION, RunConfig
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.repair import Repair
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.tinker.session import sdk
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.versions import OneVersion, PolicyVersions
from torchtitan_rl.launch.actors import Launcher
from torchtitan_rl.launch.attach import Hosts, this_host
from torchtitan_rl.launch.inventory import local_host
from torchtitan_rl.launch.preflight import check_hosts
from torchtitan_rl.launch.threads import side_by_side
from torchtitan_rl.launch.tinker import RemoteLauncher
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.validation.remote import check_remote, without_export
from torchtitan_rl.validation.run import check_local

if TYPE_CHECKING:
    from torchtitan_rl.launch.local import LocalLauncher

__all__ = ["Stack", "start_stack", "start_generators", "settled_for", "hosts_for", "launcher_for"]


@dataclass(kw_only=True, slots=True)
class Stack:
    """The clients that a controller drives, and the launcher that stops their processes."""

    launcher: Launcher | LocalLauncher | RemoteLauncher
    roles: dict[str, TrainingClient]
    """`policy`, and each of `reference`, `critic` and `teacher` that the config has; empty with generators alone."""
    generator: SamplingClient
    versions: PolicyVersions | None
    """None with generators alone: their weights are never trained or replaced."""
    placement: Placement | None
    """None where no roles share devices."""


async def start_stack(config: RunConfig, launcher: Launcher | LocalLauncher, model_dir: Path) -> Stack:
    """Starts every mesh and the store. Roles that share devices start one after the other, everything else at once."""
    here = isinstance(launcher, Launcher) and not launcher.attached
    if config.algorithm.max_policy_lag and here and platform.device_type() == "cpu":
        config = side_by_side(config)
    colocation, wanted = config.roles.colocation, config.trainers()
    placement = None if colocation == "none" else Placement(colocation)
    sharing = COLOCATION[colocation]
    meshes: dict[str, list] = {}

    async def start(role: str) -> None:
        share = config.roles.share_with(role)
        if role == "store":
            await launcher.start_store()
        elif role == "generator":
            meshes[role] = await asyncio.gather(*_generators(config, launcher, model_dir, share))
        else:
            trainer, model = wanted[role]
            meshes[role] = [await launcher.start_trainer(trainer, model, role=role, seed=config.seed, share_with=share)]
        if role in sharing:
            placement.add(role, meshes[role])
            await placement.evict(role)

    async def in_turn(roles: list[str]) -> None:
        for role in roles:
            await start(role)

    everything = [*wanted, "generator", "store"]
    shared = [role for role in everything if role in sharing]
    starts = [asyncio.ensure_future(in_turn(shared))]
    starts += [asyncio.ensure_future(start(role)) for role in everything if role not in sharing]
    try:
        await asyncio.gather(*starts)
    finally:
        for pending in starts:  # after a failure, the other meshes must not go on starting
            pending.cancel()
    roles = {
        role: TrainingClient(
            meshes[role][0],
            max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
            max_datum_tokens=trainer.training.seq_len,
            temperature=config.algorithm.temperature,
            vocab_size=resolve_shape(model).vocab_size,
            placement=placement,
        )
        for role, (trainer, model) in wanted.items()
    }
    versions = PolicyVersions(
        roles["policy"],
        launcher.store,
        config.weight_sync,
        getattr(torch, config.generator.dtype),
        one_host=launcher.one_host,
    )
    return Stack(
        launcher=launcher,
        roles=roles,
        versions=versions,
        placement=placement,
        generator=_sampling_client(
            config, meshes["generator"], versions, placement, None if placement else _repair(config, launcher)
        ),
    )


async def start_generators(config: RunConfig, launcher: Launcher | LocalLauncher, model_dir: Path) -> Stack:
    """Starts generators alone, which hold no weights yet."""
    meshes = await asyncio.gather(*_generators(config, launcher, model_dir, None))
    generator = _sampling_client(config, meshes, OneVersion(), None, None)
    return Stack(launcher=launcher, roles={}, generator=generator, versions=None, placement=None)


def _generators(config: RunConfig, launcher: Launcher | LocalLauncher, model_dir: Path, share_with: str | None) -> list:
    return [
        launcher.start_generator(
            config.generator, model_dir, role=f"generator-{i}", seed=config.seed, share_with=share_with
        )
        for i in range(config.generator.num_replicas)
    ]


def _repair(config: RunConfig, launcher: Launcher | LocalLauncher) -> Repair | None:
    """None where replicas are not replaced: without restarts, and in one process."""
    generator = config.generator
    if not generator.max_replica_restarts or not isinstance(launcher, Launcher):
        return None
    return Repair(
        launcher.restart_generator,
        on_answered=partial(launcher.keep_spares, generator) if generator.num_spares else None,
        max_restarts=generator.max_replica_restarts,
        window_s=generator.restart_window_s,
        probe_every_s=generator.probe_every_s,
        hang_timeout_s=generator.hang_timeout_s,
    )


def _sampling_client(
    config: RunConfig, meshes, versions, placement: Placement | None, repair: Repair | None
) -> SamplingClient:
    return SamplingClient(
        list(meshes),
        versions,
        max_model_len=config.generator.max_model_len,
        timeout_s=config.controller.sample_timeout_s,
        verify=config.weight_sync.verify,
        placement=placement,
        repair=repair,
    )


def hosts_for(config: RunConfig, backend: str, hosts: Hosts | None, *, generators_only: bool) -> Hosts | None:
    """The hosts of the actors; None for the other backends. Raises ValueError for a config that does not fit, and for
    hosts given with another backend."""
    if backend == "actors":
        hosts = hosts or this_host()
        check_hosts(config, hosts.hosts, generators_only=generators_only)
        return hosts
    if backend not in ("local", "tinker"):
        raise ValueError(f"backend={backend!r}: is not known; use 'actors', 'local' or 'tinker'")
    if hosts is not None:
        raise ValueError(
            f"backend={backend!r}: is this process alone, and {len(hosts.hosts)} hosts are attached; leave one of them "
            "out"
        )
    if backend == "tinker":
        sdk()
        check_remote(config, generators_only=generators_only)
        return None
    check_local(config, generators_only=generators_only)
    here = local_host()
    first_gpu = dataclasses.replace(here, devices=here.devices[:1])
    check_hosts(config, [first_gpu], generators_only=generators_only)
    return None


def settled_for(config: RunConfig, backend: str) -> RunConfig:
    """The config with nothing left open; for a remote service, without the export that no run has to ask for."""
    config = settled(config)
    return without_export(config) if backend == "tinker" and config.controller.checkpoint_export == "last" else config


def launcher_for(
    config: RunConfig, hosts: Hosts | None, log_dir: str, backend: str = "actors"
) -> Launcher | LocalLauncher | RemoteLauncher:
    """The launcher that starts the meshes: as actors on `hosts`, or without hosts all in this process or at a
    service."""
    start_s, call_s = config.controller.start_timeout_s, config.controller.call_timeout_s
    if hosts is not None:
        return Launcher(log_dir=log_dir, start_timeout_s=start_s, call_timeout_s=call_s, hosts=hosts)
    if backend == "tinker":
        return RemoteLauncher(start_timeout_s=start_s)
    from torchtitan_rl.launch.local import LocalLauncher

    return LocalLauncher(log_dir=log_dir, start_timeout_s=start_s, call_timeout_s=call_s)

"""The backend that a run asks for by name: what it refuses, and the object that starts its meshes."""

from __future__ import annotations

import dataclasses

from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.tinker.session import sdk
from torchtitan_rl.launch.actors import Launcher
from torchtitan_rl.launch.attach import Hosts, this_host
from torchtitan_rl.launch.backend import Backend
from torchtitan_rl.launch.inventory import local_host
from torchtitan_rl.launch.preflight import check_hosts
from torchtitan_rl.launch.tinker import RemoteLauncher
from torchtitan_rl.validation.remote import check_remote, without_export
from torchtitan_rl.validation.run import check_local

__all__ = ["settled_for", "hosts_for", "launcher_for"]


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


def launcher_for(config: RunConfig, hosts: Hosts | None, log_dir: str, backend: str = "actors") -> Backend:
    """What starts the meshes: as actors on `hosts`, or without hosts all in this process or at a
    service."""
    start_s, call_s = config.controller.start_timeout_s, config.controller.call_timeout_s
    if hosts is not None:
        return Launcher(log_dir=log_dir, start_timeout_s=start_s, call_timeout_s=call_s, hosts=hosts)
    if backend == "tinker":
        return RemoteLauncher(start_timeout_s=start_s)
    from torchtitan_rl.launch.local import LocalLauncher

    return LocalLauncher(log_dir=log_dir, start_timeout_s=start_s, call_timeout_s=call_s)

"""The backends that a run may ask for by name. Here a name is looked up; every other question is one to the backend.

Launchers are imported when a run starts them: a config is checked without Monarch, vLLM and TorchStore.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.launch.backend import Backend, Launcher
from torchtitan_rl.launch.inventory import Host, local_host
from torchtitan_rl.launch.preflight import check_hosts
from torchtitan_rl.model.files import has_weights
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.validation.remote import check_remote, without_export
from torchtitan_rl.validation.run import check_local, missing_weights

if TYPE_CHECKING:
    from torchtitan_rl.launch.attach import Hosts
    from torchtitan_rl.record.schedule import Schedules

__all__ = ["BACKENDS", "ActorBackend", "LocalBackend", "RemoteBackend", "backend_of"]


class ActorBackend:
    """Trainers and generators are actors, in processes of their own on one host or several. A `Backend`."""

    takes_hosts = True
    in_this_process = False
    has_engines = True

    def settle(self, config: RunConfig) -> RunConfig:
        return settled(config)

    def check(self, config: RunConfig, *, generators_only: bool) -> None:
        """Refuses nothing: what a run needs of its hosts is for `hosts_for`."""

    def hosts_for(self, config: RunConfig, hosts: Hosts | None, *, generators_only: bool) -> Hosts:
        from torchtitan_rl.launch.attach import this_host

        hosts = hosts or this_host()
        check_hosts(config, hosts.hosts, generators_only=generators_only)
        return hosts

    def device_name(self, hosts: Hosts | None) -> str:
        return _gpu_name(hosts.hosts[0])

    def missing_weights(self, config: RunConfig) -> str:
        return missing_weights(config) or _misfit(config)

    def launcher(
        self, config: RunConfig, hosts: Hosts | None, log_dir: str, schedules: Schedules | None = None
    ) -> Launcher:
        from torchtitan_rl.launch.actors import ActorLauncher

        start_s, call_s = config.controller.start_timeout_s, config.controller.call_timeout_s
        return ActorLauncher(
            log_dir=log_dir, start_timeout_s=start_s, call_timeout_s=call_s, hosts=hosts, schedules=schedules
        )


class LocalBackend:
    """Trainers and generators are objects in the controller's process, on one device, for a debugger. A `Backend`."""

    takes_hosts = False
    in_this_process = True
    has_engines = True

    def settle(self, config: RunConfig) -> RunConfig:
        return settled(config)

    def check(self, config: RunConfig, *, generators_only: bool) -> None:
        check_local(config, generators_only=generators_only)

    def hosts_for(self, config: RunConfig, hosts: Hosts | None, *, generators_only: bool) -> None:
        _check_no_hosts("local", hosts)
        self.check(config, generators_only=generators_only)
        here = local_host()
        first_gpu = dataclasses.replace(here, devices=here.devices[:1])
        check_hosts(config, [first_gpu], generators_only=generators_only)

    def device_name(self, hosts: Hosts | None) -> str:
        return _gpu_name(local_host())

    def missing_weights(self, config: RunConfig) -> str:
        return missing_weights(config) or _misfit(config)

    def launcher(
        self, config: RunConfig, hosts: Hosts | None, log_dir: str, schedules: Schedules | None = None
    ) -> Launcher:
        from torchtitan_rl.launch.local import LocalLauncher

        start_s, call_s = config.controller.start_timeout_s, config.controller.call_timeout_s
        return LocalLauncher(log_dir=log_dir, start_timeout_s=start_s, call_timeout_s=call_s, schedules=schedules)


class RemoteBackend:
    """A service that speaks Tinker's protocol trains and samples. A `Backend`."""

    takes_hosts = False
    in_this_process = False
    has_engines = False

    def settle(self, config: RunConfig) -> RunConfig:
        """Leaves out the export of the last checkpoint too, which is a default and no wish: a service keeps its
        weights."""
        config = settled(config)
        return without_export(config) if config.controller.checkpoint_export == "last" else config

    def check(self, config: RunConfig, *, generators_only: bool) -> None:
        check_remote(config, generators_only=generators_only)

    def hosts_for(self, config: RunConfig, hosts: Hosts | None, *, generators_only: bool) -> None:
        from torchtitan_rl.dispatch.tinker.session import sdk

        _check_no_hosts("tinker", hosts)
        sdk()
        self.check(config, generators_only=generators_only)

    def device_name(self, hosts: Hosts | None) -> None:
        """None: the service does not say what it computes on."""

    def missing_weights(self, config: RunConfig) -> str:
        """None are missing: the service has the weights of the models that it offers."""
        return ""

    def launcher(
        self, config: RunConfig, hosts: Hosts | None, log_dir: str, schedules: Schedules | None = None
    ) -> Launcher:
        from torchtitan_rl.launch.tinker import RemoteLauncher

        return RemoteLauncher(start_timeout_s=config.controller.start_timeout_s)


BACKENDS: dict[str, Backend] = {"actors": ActorBackend(), "local": LocalBackend(), "tinker": RemoteBackend()}


def backend_of(name: str) -> Backend:
    """The backend of a name. Raises ValueError for a name that none has."""
    if name not in BACKENDS:
        raise ValueError(f"backend={name!r}: is not known; use 'actors', 'local' or 'tinker'")
    return BACKENDS[name]


def _gpu_name(host: Host) -> str:
    """Of a host's first GPU; "" where NVML lists none."""
    return host.cuda.gpus[0].name if host.cuda is not None and host.cuda.gpus else ""


def _check_no_hosts(name: str, hosts: Hosts | None) -> None:
    if hosts is not None:
        raise ValueError(
            f"backend={name!r}: is this process alone, and {len(hosts.hosts)} hosts are attached; leave one of them out"
        )


def _misfit(config: RunConfig) -> str:
    """Why the weights of a role's directory do not fit its model; empty when they do, or when there are none."""
    reward_model, trainers = config.roles.reward_model, config.trainers()
    if reward_model is not None and reward_model.checkpoint:
        _, model = trainers.pop("reward_model")
        if misfit := _checkpoint_misfit(Path(reward_model.checkpoint), resolve_shape(model)):
            return misfit
    if not any(has_weights(model) for _, model in trainers.values()):
        return ""
    from torchtitan_rl.actors.operations import VALUE_ROLES
    from torchtitan_rl.weights.hf import weights_misfit  # torchtitan takes seconds, and other runs do not need it here

    misfits = (
        weights_misfit(model, head=role not in VALUE_ROLES, score=role == "reward_model")
        for role, (_, model) in trainers.items()
        if has_weights(model)
    )
    return next(filter(None, misfits), "")


def _checkpoint_misfit(checkpoint: Path, shape: DecoderShape) -> str:
    """Why a checkpoint is not of a model of these sizes with a value head; empty when it is."""
    from torchtitan_rl.weights.checkpoint import model_dir
    from torchtitan_rl.weights.saved_state import saved_sizes

    sizes = saved_sizes(model_dir(checkpoint))
    expected_sizes = {"lm_head.weight": (1, shape.dim), "tok_embeddings.weight": (shape.vocab_size, shape.dim)}
    for name, size in expected_sizes.items():
        if (saved := sizes.get(f"model.{name}")) != size:
            there = "is not there" if saved is None else f"is {list(saved)}, not {list(size)}"
            return (
                f"roles.reward_model.checkpoint={str(checkpoint)!r}: {name} {there}; give the checkpoint of a model "
                "with a value head, such as step-100/critic, and its sizes as roles.reward_model.model"
            )
    return ""

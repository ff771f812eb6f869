"""Checks of the hosts' GPUs before anything starts: driver, compiler, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torchtitan_rl.launch.inventory import Host, check_fits, places
from torchtitan_rl.model.memory import gpu_bytes, run_parts

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.launch.gpus import Gpu

__all__ = ["check_hosts", "host_problem", "memory_problem", "busy_problem", "MEMORY_CHECK"]

MEMORY_CHECK = "TORCHTITAN_RL_MEMORY_CHECK"
"""Environment variable; "0" starts a run although by estimate the run does not fit."""

_DRIVERS = {"12": "525", "13": "580"}
"""The oldest driver for a major version of CUDA: NVIDIA's CUDA Toolkit Release Notes, "CUDA Toolkit and Minimum
Required Driver Version for CUDA Minor Version Compatibility"."""


def check_hosts(config: RunConfig, hosts: list[Host], *, generators_only: bool = False) -> None:
    """Raises ValueError, with the numbers, for a run that these hosts cannot carry now: a driver that is missing or too
    old, no C compiler, a config that `check_fits` refuses, too little GPU memory by estimate, or too little free.

    For hosts without CUDA `check_fits` is the only check.
    """
    for host in hosts:
        if problem := host_problem(host):
            raise ValueError(problem)
    check_fits(config, hosts, generators_only=generators_only)
    for check in (memory_problem, busy_problem):
        if problem := check(config, hosts, generators_only=generators_only):
            raise ValueError(problem)


def host_problem(host: Host) -> str:
    """Why no config can run on this host's GPUs; "" when one can, and on a CPU host."""
    cuda = host.cuda
    if cuda is None:
        return ""
    oldest_driver = _DRIVERS.get(cuda.torch_cuda.split(".")[0], "")
    build = f"torch={cuda.torch_version}: is built for CUDA {cuda.torch_cuda}"
    driver = (
        f"a driver of version {oldest_driver} or newer" if oldest_driver else f"a driver for CUDA {cuda.torch_cuda}"
    )
    on_cpu = "TORCHTITAN_RL_EXTRA=cpu bash scripts/setup.sh, and CUDA_VISIBLE_DEVICES= where there are GPUs to hide"
    if "nvidia-ml-py" in cuda.error:
        return f"{build}, and {cuda.error} on {host.address}, which says what its GPUs are; run scripts/setup.sh"
    if cuda.error:
        return (
            f"{build}, and no NVIDIA driver answers on {host.address} ({cuda.error}); install {driver}, or say that "
            f"the CPU is meant: {on_cpu}"
        )
    if int(cuda.driver_cuda.split(".")[0]) < int(cuda.torch_cuda.split(".")[0]):
        return (
            f"driver={cuda.driver}: runs CUDA {cuda.driver_cuda} at most, and torch {cuda.torch_version} on "
            f"{host.address} is built for CUDA {cuda.torch_cuda}; install {driver}"
        )
    if not cuda.gpus and cuda.visible is not None:
        return (
            f"CUDA_VISIBLE_DEVICES={cuda.visible!r}: names none of the {cuda.num_gpus} GPUs of {host.address}; use "
            f"numbers below {cuda.num_gpus} or UUIDs that nvidia-smi -L prints, or leave it empty to mean the CPU"
        )
    if not cuda.gpus:
        return (
            f"{build}, and {host.address} has a driver ({cuda.driver}) but no GPU; use a host with one, or say that "
            f"the CPU is meant: {on_cpu}"
        )
    if cuda.missing_toolchain:
        return f"{cuda.missing_toolchain} ({host.address})"
    return ""


def memory_problem(
    config: RunConfig,
    hosts: list[Host],
    *,
    generators_only: bool = False,
    parts: dict[str, dict[str, int]] | None = None,
) -> str:
    """Why a GPU is too small for the meshes placed on it, by estimate; "" when every GPU is large enough. `parts`: in
    place of `run_parts`."""
    for host, gpu, roles, run_bytes, by_role in _loads(config, hosts, generators_only, parts):
        if run_bytes > gpu.total_bytes:
            each = ", ".join(
                f"{role} {_gib(sum(part.values()))}" for role, part in by_role.items() if _any(role, roles)
            )
            return (
                f"gpu={gpu.device} ({gpu.name}) of {host.address}: has {_gib(gpu.total_bytes)} GiB, and "
                f"{_names(roles)} would need about {_gib(run_bytes)} (tensors of {each}); lower "
                "trainer.max_tokens_per_microbatch or generator.kv_cache_gib, use "
                "trainer.activation_checkpoint='full', roles.colocation='all' or more GPUs, or start anyway with "
                f"{MEMORY_CHECK}=0"
            )
    return ""


def busy_problem(config: RunConfig, hosts: list[Host], *, generators_only: bool = False) -> str:
    """Why a GPU has too little free memory now, by estimate; "" when every GPU has enough."""
    for host, gpu, roles, run_bytes, _ in _loads(config, hosts, generators_only):
        if run_bytes > gpu.free_bytes:
            return (
                f"gpu={gpu.device} ({gpu.name}) of {host.address}: {_gib(gpu.free_bytes)} of {_gib(gpu.total_bytes)} "
                f"GiB are free, and {_names(roles)} would need about {_gib(run_bytes)}; {_users(gpu)}; wait for it, "
                f"end it, choose another GPU with CUDA_VISIBLE_DEVICES, or start anyway with {MEMORY_CHECK}=0"
            )
    return ""


def _loads(
    config: RunConfig, hosts: list[Host], generators_only: bool, parts: dict[str, dict[str, int]] | None = None
) -> Iterator[tuple[Host, Gpu, list[str], int, dict[str, dict[str, int]]]]:
    """(host, GPU, the meshes on the GPU, the bytes that they need, parts by role) for every GPU that a run would
    use."""
    if all(host.cuda is None for host in hosts) or os.environ.get(MEMORY_CHECK) == "0":
        return
    placed, parts = places(config, hosts, generators_only=generators_only), parts or run_parts(config)
    for index, host in enumerate(hosts):
        for gpu in host.cuda.gpus if host.cuda is not None else []:
            roles = [
                role
                for role, place in placed.items()
                if index in place.hosts and gpu.device in place.devices[place.hosts.index(index)].split(",")
            ]
            if roles:
                yield host, gpu, roles, gpu_bytes(config, roles, parts), parts


def _any(role: str, meshes: list[str]) -> bool:
    return any(mesh == role or mesh.startswith(f"{role}-") for mesh in meshes)


def _users(gpu: Gpu) -> str:
    """The three processes that hold most memory of a GPU, in words."""
    if not gpu.users:
        return "NVML names no process that holds the rest (another container's, perhaps)"
    shown = [
        f"pid {user.pid} ({', '.join(filter(None, (user.program, user.num_bytes and f'{_gib(user.num_bytes)} GiB')))})"
        if user.program or user.num_bytes
        else f"pid {user.pid}"
        for user in gpu.users[:3]
    ]
    more = f" and {len(gpu.users) - 3} more" if len(gpu.users) > 3 else ""
    return f"in use by {', '.join(shown)}{more}"


def _names(roles: list[str]) -> str:
    return ", ".join(roles[:-1]) + " and " + roles[-1] if len(roles) > 1 else roles[0]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"

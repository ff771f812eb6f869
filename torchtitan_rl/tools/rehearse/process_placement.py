"""Hosts that do not exist yet, and who would sit on them, by the rules of a launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchtitan_rl.launch.gpus import Cuda, Gpu
from torchtitan_rl.launch.inventory import Host, MeshSize, Place

__all__ = ["Seat", "imagined_hosts", "host_of_ranks", "seats"]


def imagined_hosts(num_hosts: int, gpus_per_host: int, cores_per_host: int, gpu: str, gpu_gib: float) -> list[Host]:
    """Equal hosts, `host0` and on, with free GPUs of `gpu_gib`; without GPUs, CPU hosts. Raises ValueError for numbers
    that no host has."""
    for name, number, least in (
        ("hosts", num_hosts, 1),
        ("gpus-per-host", gpus_per_host, 0),
        ("cores-per-host", cores_per_host, 1),
    ):
        if number < least:
            raise ValueError(f"--{name}={number}: must be at least {least}")
    if gpus_per_host and not 0 < gpu_gib < float("inf"):
        raise ValueError(f"--gpu-memory-gib={gpu_gib:g}: must be positive; give what one GPU has")
    hosts, size = [], int(gpu_gib * 2**30)
    for index in range(num_hosts):
        devices = [str(device) for device in range(gpus_per_host)]
        gpus = [Gpu(device=device, name=gpu, total_bytes=size, free_bytes=size) for device in devices]
        cuda = Cuda(torch_version=torch.__version__, torch_cuda="", num_gpus=gpus_per_host, gpus=gpus)
        hosts.append(
            Host(address=f"host{index}", num_cores=cores_per_host, devices=devices, cuda=cuda if gpus else None)
        )
    return hosts


def host_of_ranks(mesh: MeshSize, place: Place) -> list[int]:
    """The host of each rank of a mesh: ranks are numbered host by host."""
    per_host = mesh.num_ranks // len(place.hosts)
    return [place.hosts[rank // per_host] for rank in range(mesh.num_ranks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Hosts that look alike: `Seat(first=0, last=63, meshes=("8 ranks of policy on GPU 0-7",))`."""

    first: int
    last: int
    meshes: tuple[str, ...]


def seats(sizes: list[MeshSize], placed: dict[str, Place], num_hosts: int) -> list[Seat]:
    """Who sits on which hosts; neighbours with the same kinds of meshes on the same devices are told together."""
    per_host: list[dict[tuple[str, int], list[str]]] = [{} for _ in range(num_hosts)]
    for mesh in sizes:
        place = placed[mesh.role]
        for host, devices in zip(place.hosts, place.devices, strict=True):
            kind = "generator" if mesh.replica else mesh.role, mesh.num_ranks // len(place.hosts)
            per_host[host].setdefault(kind, []).append(devices)
    grouped: list[Seat] = []
    for index, meshes_of_host in enumerate(per_host):
        meshes = tuple(_mesh_text(role, number, devices) for (role, number), devices in meshes_of_host.items())
        if grouped and grouped[-1].meshes == meshes:
            grouped[-1] = Seat(first=grouped[-1].first, last=index, meshes=meshes)
        else:
            grouped.append(Seat(first=index, last=index, meshes=meshes))
    return grouped


def _mesh_text(role: str, number: int, devices: list[str]) -> str:
    """`2 generators of 4 ranks on GPU 0-7`."""
    ranks = f"{number} rank{'s' if number > 1 else ''}"
    who = f"{ranks} of {role}" if role != "generator" else f"{len(devices)} generators of {ranks}"
    who = who.replace("1 generators", "1 generator") if len(devices) == 1 else who
    return f"{who} on GPU {_spans(','.join(devices))}" if devices[0] else who


def _spans(devices: str) -> str:
    """`0-3` for `0,1,2,3`."""
    numbers = [int(device) for device in devices.split(",")]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return devices

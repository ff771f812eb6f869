"""The hosts of a run: the cores and GPUs of each host, which GPUs are in use, and whether a config fits."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
import torch

from torchtitan_rl import platform
from torchtitan_rl.launch.gpus import Cuda, look

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig

__all__ = [
    "Host",
    "local_host",
    "address_towards",
    "assumed_host",
    "interface_of",
    "use_interface_of",
    "MeshSize",
    "meshes",
    "Place",
    "Devices",
    "places",
    "check_fits",
]


@dataclass(kw_only=True, slots=True)
class Host:
    """One machine of a run: `Host(address="10.0.0.5", num_cores=64, devices=["0", "1"])`."""

    address: str
    """The name of the host in errors."""
    num_cores: int
    devices: list[str] = field(default_factory=list)
    """The host's GPUs, as CUDA_VISIBLE_DEVICES names them; empty on a CPU host."""
    cuda: Cuda | None = None
    """Driver and GPUs, which `launch/preflight.py` checks; None on a CPU host and for a host that was not examined."""
    ranks_per_core: int = 2
    """The generator ranks, and ranks of each trainer role, that a core carries at most where there are no GPUs."""


def local_host(address: str = "this host") -> Host:
    """The machine of this process, with the GPUs that the user's CUDA_VISIBLE_DEVICES shows."""
    cuda = look()
    devices = [gpu.device for gpu in cuda.gpus] if cuda is not None else []
    if cuda is None and platform.device_type() == "cuda":  # an AMD GPU, which NVML does not list
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return Host(address=address, num_cores=platform.num_cores(), devices=devices, cuda=cuda)


def assumed_host(index: int, num_gpus: int) -> Host:
    """A node that a scheduler has yet to choose: as many cores as this machine has, and `num_gpus` GPUs. A run examines
    the real ones when it begins."""
    devices = [str(device) for device in range(num_gpus)]
    return Host(address=f"host {index}", num_cores=local_host().num_cores, devices=devices)


def address_towards(host: str, port: int) -> str:
    """This machine's IPv4 address on the interface that leads to `host`. Sends nothing. Raises ValueError for a `host`
    that cannot be resolved or routed to by IPv4, which everything else here speaks."""
    try:
        entries = socket.getaddrinfo(host, port, family=socket.AF_INET, type=socket.SOCK_DGRAM)
        family, kind, proto, _, address = entries[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError as error:
        raise ValueError(
            f"host={host!r}: cannot be resolved or routed to by IPv4 ({error}); give another address, or this "
            "host's own in TORCHTITAN_RL_HOST_ADDRESS"
        ) from None


def interface_of(host: str) -> dict[str, str]:
    """The environment variables that make gloo and NCCL use the interface with the address `host` of this machine; {}
    where no interface has it. By default gloo listens on the address that the host's name resolves to."""
    own = ipaddress.ip_address(socket.gethostbyname(host))
    for name, addresses in psutil.net_if_addrs().items():
        # All of 127.0.0.0/8 belongs to the loopback interface, which lists 127.0.0.1 alone.
        if any(
            a.family == socket.AF_INET and (a.address == str(own) or own.is_loopback and a.address == "127.0.0.1")
            for a in addresses
        ):
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
    return {}


def use_interface_of(host: str) -> None:
    """Sets the variables of `interface_of(host)` for this process and its children. Keeps the user's."""
    for name, value in interface_of(host).items():
        os.environ.setdefault(name, value)


@dataclass(kw_only=True, slots=True)
class MeshSize:
    """The ranks, hosts and GPUs that one mesh asks for."""

    role: str
    num_ranks: int
    num_hosts: int = 1
    """Number of hosts that the mesh spans, with the same number of ranks on each."""
    replica: bool = False
    """Whether the mesh is a generator replica. Replicas go round the hosts."""
    host: int | None = None
    """The index of the one host where the mesh is to be; None: any."""
    share_with: str | None = None
    """The role whose GPUs the mesh uses; None: GPUs of its own."""


def meshes(config: RunConfig) -> list[MeshSize]:
    """The meshes of a run, in the order they start."""
    generator, share_with = config.generator, config.roles.share_with
    return [
        *(
            MeshSize(role=role, num_ranks=trainer.num_ranks, num_hosts=trainer.num_hosts, share_with=share_with(role))
            for role, (trainer, _) in config.trainers().items()
        ),
        *(
            MeshSize(
                role=f"generator-{i}",
                num_ranks=generator.tensor_parallel_degree,
                replica=True,
                share_with=share_with("generator"),
            )
            for i in range(generator.num_replicas)
        ),
    ]


@dataclass(kw_only=True, slots=True)
class Place:
    """Where a mesh goes: indices of hosts, and for each host the CUDA_VISIBLE_DEVICES of the mesh's ranks there, empty
    on a CPU host."""

    hosts: list[int]
    devices: list[str]


class Devices:
    """Which meshes use which GPU. Meshes take GPUs in the order they start. A GPU has one user, with two exceptions:
    meshes that ask to share, and a host with exactly one GPU, which all meshes of that host share."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        self._users = [dict.fromkeys(host.devices, 0) for host in hosts]
        self._places: dict[str, Place] = {}
        self._replica_ranks = [0] * len(hosts)
        self._trained_on: set[int] = set()
        self._next_replica = 0
        self._closed: set[int] = set()

    def add(self) -> None:
        """Takes up the next one of `hosts`, which has joined."""
        self._users.append(dict.fromkeys(self.hosts[len(self._users)].devices, 0))
        self._replica_ranks.append(0)

    def close(self, index: int) -> None:
        """No mesh gets a place on a host any more."""
        self._closed.add(index)

    def take(self, mesh: MeshSize) -> Place:
        """A place for a mesh. Raises ValueError, with the numbers, when no hosts have room."""
        size = self._ranks_per_host(mesh)
        order = list(range(len(self.hosts)))
        if mesh.replica:  # round robin, from the first host without trainer ranks
            order = order[self._next_replica :] + order[: self._next_replica]
        order = [index for index in order if index not in self._closed and mesh.host in (None, index)]
        offers = {index: self._offer(index, mesh) for index in order}
        with_devices = [index for index in order if offers[index] is None or len(offers[index]) >= size]
        faults = {index: self._fault_of_cores(index, mesh, size) for index in with_devices}
        fitting = [index for index in with_devices if not faults[index]]
        # Hosts of one mesh have adjacent indices: Monarch slices a mesh of hosts by ranges.
        windows = [range(index, index + mesh.num_hosts) for index in fitting]
        chosen = next((list(window) for window in windows if set(window) <= set(fitting)), None)
        if chosen is None:
            raise ValueError(next(filter(None, faults.values()), "") or self._refusal(mesh, size, offers))
        place = Place(hosts=chosen, devices=[",".join((offers[index] or [])[:size]) for index in chosen])
        self._note(mesh, place, size)
        return place

    def give_back(self, mesh: MeshSize) -> None:
        """The place of a generator replica becomes free."""
        place = self._places.pop(mesh.role)
        for index, devices in zip(place.hosts, place.devices, strict=True):
            for device in filter(None, devices.split(",")):
                self._users[index][device] -= 1
            self._replica_ranks[index] -= mesh.num_ranks // len(place.hosts)

    def _ranks_per_host(self, mesh: MeshSize) -> int:
        if mesh.num_hosts < 1:
            raise ValueError(f"trainer.num_hosts={mesh.num_hosts} ({mesh.role}): must be at least 1")
        if mesh.num_hosts > len(self.hosts):
            raise ValueError(
                f"trainer.num_hosts={mesh.num_hosts} ({mesh.role}): the launch has {_count(self.hosts, 'host')} "
                f"({_addresses(self.hosts)}); start it on more hosts (scripts/train_torchrun.sh) or lower num_hosts"
            )
        if mesh.num_ranks % mesh.num_hosts:
            raise ValueError(
                f"trainer.num_hosts={mesh.num_hosts} ({mesh.role}): does not divide the mesh's {mesh.num_ranks} ranks "
                "(the product of trainer.parallelism's degrees); change one of them"
            )
        return mesh.num_ranks // mesh.num_hosts

    def _offer(self, index: int, mesh: MeshSize) -> list[str] | None:
        """The GPUs of a host that a mesh may use, fewest users first; None on a CPU host."""
        users = self._users[index]
        if not users:
            return None
        if mesh.share_with is not None:
            place = self._places[mesh.share_with]
            allowed = place.devices[place.hosts.index(index)].split(",") if index in place.hosts else []
        elif len(users) == 1:
            allowed = list(users)
        else:
            allowed = [device for device, count in users.items() if count == 0]
        return sorted(allowed, key=users.__getitem__)

    def _refusal(self, mesh: MeshSize, size: int, offers: dict[int, list[str] | None]) -> str:
        there = ", ".join(
            f"{len(offers[index] or [])} of {len(self._users[index])} on {self.hosts[index].address}"
            for index in sorted(offers)
        )
        resource = "free GPUs" if mesh.share_with is None else f"GPUs of {mesh.share_with} to share"
        return (
            f"{mesh.role}: needs {_count(size, 'GPU')} on {_count(mesh.num_hosts, 'host')}; {resource}: {there}; "
            "lower the parallel degrees or generator.num_replicas, or add GPUs"
        )

    def _fault_of_cores(self, index: int, mesh: MeshSize, size: int) -> str:
        """Says that a mesh would make more ranks than the cores of a CPU host carry; "" where it does not. Trainers and
        generators compute one after the other, so generator ranks and each trainer role's ranks are counted
        separately."""
        host = self.hosts[index]
        ranks, most = size + (self._replica_ranks[index] if mesh.replica else 0), host.ranks_per_core * host.num_cores
        if host.devices or ranks <= most:
            return ""
        kind = "generator ranks" if mesh.replica else f"ranks of {mesh.role}"
        return (
            f"{mesh.role}: would make {ranks} {kind} on {host.address}, whose {_count(host.num_cores, 'core')} "
            f"carry at most {most}; lower the degrees or generator.num_replicas"
        )

    def _note(self, mesh: MeshSize, place: Place, size: int) -> None:
        self._places[mesh.role] = place
        for index, devices in zip(place.hosts, place.devices, strict=True):
            for device in filter(None, devices.split(",")):
                self._users[index][device] += 1
            if mesh.replica:
                self._replica_ranks[index] += size
                self._next_replica = (index + 1) % len(self.hosts)
        if not mesh.replica:
            self._trained_on.update(place.hosts)
            self._next_replica = min(set(range(len(self.hosts))) - self._trained_on, default=0)


def places(config: RunConfig, hosts: list[Host], *, generators_only: bool = False) -> dict[str, Place]:
    """Where every mesh of a run goes, by role. Raises ValueError, with the numbers, when a mesh has no place."""
    devices = Devices(hosts)
    return {
        mesh.role: devices.take(dataclasses.replace(mesh, share_with=None) if generators_only else mesh)
        for mesh in meshes(config)
        if mesh.replica or not generators_only
    }


def check_fits(config: RunConfig, hosts: list[Host], *, generators_only: bool = False) -> None:
    """Checks that every mesh of a run has a place on `hosts`; starts nothing. Raises ValueError, with the numbers, for
    too few hosts, GPUs or cores, ranks that do not divide over hosts, more threads than cores, idle hosts, and weights
    in shared memory between hosts."""
    used = {index for place in places(config, hosts, generators_only=generators_only).values() for index in place.hosts}
    if idle := [host for index, host in enumerate(hosts) if index not in used]:
        raise ValueError(
            f"hosts={len(hosts)}: the config's meshes use {len(used)} of them, {_addresses(idle)} would be idle; raise "
            "trainer.num_hosts or generator.num_replicas, or launch on fewer hosts"
        )
    if config.weight_sync.transport == "shared_memory" and len(used) > 1 and not generators_only:
        raise ValueError(
            f"weight_sync.transport='shared_memory': the config's meshes are on {len(used)} hosts, and no host reads "
            "another one's memory; use 'auto' or 'store'"
        )
    smallest = min(hosts, key=lambda host: host.num_cores)
    num_threads = {
        "trainer" if role == "policy" else f"roles.{role}.trainer": trainer.num_threads
        for role, (trainer, _) in config.trainers().items()
    } | {"generator": config.generator.num_threads}
    for setting, threads in num_threads.items():
        if not 0 <= threads <= smallest.num_cores:
            raise ValueError(
                f"{setting}.num_threads={threads}: {smallest.address} has "
                f"{_count(smallest.num_cores, 'core')}; use at most {smallest.num_cores}, or 0 to share the "
                "cores among the ranks"
            )


def _count(quantity: int | list, noun: str) -> str:
    number = quantity if isinstance(quantity, int) else len(quantity)
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _addresses(hosts: list[Host]) -> str:
    return ", ".join(host.address for host in hosts)

"""Addresses at which hosts find each other. With several hosts none may be a loopback, which leads back to the host
that uses it: Debian's /etc/hosts has a host's own name there.

`python -m torchtitan_rl.launch.addresses` checks the environment of scripts/train_torchrun.sh before torchrun starts.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping, Sequence

from torchtitan_rl.environment import HOST_ADDRESS

__all__ = ["split", "loopback", "torchrun_problem", "workers_problem", "worker_problem", "network", "is_number"]

_GIVE = f"set {HOST_ADDRESS} to this host's address on the network that the hosts share"


def split(worker: str) -> tuple[str, int]:
    """Host and port of a worker's address, tcp://HOST:PORT. Raises ValueError for another form."""
    host, _, port = worker.removeprefix("tcp://").rpartition(":")
    if not worker.startswith("tcp://") or not host or not (port.isascii() and port.isdigit()):
        raise ValueError(f"hosts={worker!r}: is not the address of a worker; write tcp://HOST:PORT")
    if int(port) > 65535:
        raise ValueError(f"hosts={worker!r}: no port is above 65535; write tcp://HOST:PORT with one that is free")
    if ":" in host or "[" in host:
        raise ValueError(f"hosts={worker!r}: workers listen on IPv4 alone; write a name or an IPv4 address as HOST")
    return host, int(port)


def loopback(host: str) -> str:
    """The loopback address that `host` resolves to on this machine; "" when it resolves to none, or not at all."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except OSError:
        return ""  # whoever connects says it
    return min((address for address in addresses if ipaddress.ip_address(address).is_loopback), default="")


def is_number(host: str) -> bool:
    """Whether `host` is an IP address and no name."""
    try:
        return bool(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return False


def torchrun_problem(environment: Mapping[str, str]) -> str:
    """Why other hosts would not find this one, or this one rank 0, with these settings of train_torchrun.sh; "" when
    nothing speaks against it. A loopback address as a number in TORCHTITAN_RL_HOST_ADDRESS says that all hosts are on
    one machine."""
    master, own = environment.get("MASTER_ADDR", "127.0.0.1"), environment.get(HOST_ADDRESS, "")
    numbers = {name: environment.get(name, default) for name, default in (("NNODES", "1"), ("NODE_RANK", "0"))}
    for name, text in numbers.items():
        if not text.isdigit():
            return f"{name}={text!r}: is not a number; give the number of hosts in NNODES and this host's in NODE_RANK"
    num_hosts, rank = map(int, numbers.values())
    if num_hosts < 1:
        return f"NNODES={num_hosts}: a run needs a host; give the number of hosts"
    if rank >= num_hosts:
        return f"NODE_RANK={rank}: with NNODES={num_hosts} the last rank is {num_hosts - 1}; give this host's, from 0"
    if num_hosts == 1:
        return ""
    if own and (address := loopback(own)):
        if is_number(own):
            return ""
        return (
            f"{HOST_ADDRESS}={own}: resolves to {address}, the loopback of this host, where no other host finds it; "
            f"{_GIVE}"
        )
    if (address := loopback(master)) and rank:
        return (
            f"MASTER_ADDR={master}: resolves to {address}, the loopback of this host, and rank 0 is on another host; "
            "give rank 0's address on the network that the hosts share"
        )
    if address and not own:
        return (
            f"MASTER_ADDR={master}: resolves to {address}, the loopback of this host, where none of the other "
            f"{num_hosts - 1} finds it; {_GIVE}"
        )
    return ""


def workers_problem(workers: Sequence[str], own: str) -> str:
    """Why the workers and the controller, which is reached at `own`, would not all find each other: some have loopback
    addresses and some have not; "" when all have or none has."""
    loopbacks = {worker: loopback(split(worker)[0]) for worker in workers}
    inside, outside = [w for w in workers if loopbacks[w]], [w for w in workers if not loopbacks[w]]
    if inside and outside:
        return (
            f"hosts={inside[0]}: resolves to {loopbacks[inside[0]]}, the loopback of this host, where {outside[0]} "
            "does not find it; give its address on the network that the hosts share"
        )
    if outside and (address := loopback(own)):
        return (
            f"{HOST_ADDRESS}={own}: resolves to {address}, the loopback of this host, where {outside[0]} does not find "
            f"it; {_GIVE}"
        )
    return ""


def worker_problem(worker: str) -> str:
    """Why other hosts cannot reach a worker at its address, tcp://HOST:PORT: a name that resolves to the loopback, or
    the number that stands for every address; "" when they can. Raises ValueError for an address of another form."""
    host, port = split(worker)
    if is_number(host) and ipaddress.ip_address(host).is_unspecified:
        return (
            f"{worker}: stands for every address of this host, and for none of them on another host; give the address "
            "that the others reach it at"
        )
    if is_number(host) or host == "localhost" or not (address := loopback(host)):
        return ""
    return (
        f"{worker}: {host} resolves to {address}, the loopback of this host, where no other host finds the worker; "
        f"give the address that the others reach it at (tcp://127.0.0.1:{port} if they are on this machine)"
    )


def network() -> str:
    """What names the network stack of this process: the same for all processes that share a loopback."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


if __name__ == "__main__":
    if problem := torchrun_problem(os.environ):
        sys.exit(f"error: {problem}")

"""An actor that reports what its host has: cores, GPUs, code, the time."""

from __future__ import annotations

import os
import socket

from monarch.actor import Actor, endpoint

from torchtitan_rl.launch.agreement import HostFacts, facts
from torchtitan_rl.launch.inventory import Host, local_host

__all__ = ["HostProbe"]


class HostProbe(Actor):
    """One process on a host; `launch.attach` stops it after the answer."""

    @endpoint
    async def host(self, address: str | None) -> Host:
        """Cores and GPUs of this host. Without an `address`, the host's name and the worker's port are the address."""
        return local_host(address or f"{socket.getfqdn()}:{_worker_port()}")

    @endpoint
    async def facts(self, config_file: str | None) -> HostFacts:
        """What the hosts of a run have to agree about."""
        return facts(config_file)


def _worker_port() -> str:
    """The port that a worker of a Monarch job listens on: MONARCH_PORT in a pod, Monarch's default under Slurm."""
    return os.environ.get("MONARCH_PORT", "22222")

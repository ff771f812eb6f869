"""Asks a host what it offers."""

from __future__ import annotations

import os
import socket

from monarch.actor import Actor, endpoint

from torchtitan_rl.hosts.inventory import Host, local_host

__all__ = ["HostProbe"]


class HostProbe(Actor):
    """One process on a host, gone as soon as it has answered."""

    @endpoint
    async def host(self, address: str | None) -> Host:
        """Cores and GPUs of the host this runs on, which without an address is called by name and worker's port."""
        return local_host(address or f"{socket.getfqdn()}:{_worker_port()}")


def _worker_port() -> str:
    """Where Monarch's jobs let a worker listen: a pod is told, Slurm's workers use the default."""
    return os.environ.get("MONARCH_PORT", "22222")

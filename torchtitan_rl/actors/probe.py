"""Asks a host what it offers."""

from __future__ import annotations

from monarch.actor import Actor, endpoint

from torchtitan_rl.hosts import Host, local_host

__all__ = ["HostProbe"]


class HostProbe(Actor):
    """One process on a host, gone as soon as it has answered."""

    @endpoint
    async def host(self, address: str) -> Host:
        """Cores and GPUs of the host this runs on."""
        return local_host(address)

"""The hosts of a run on which sandboxes are opened: the controller's own, and others by their actors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from torchtitan_rl.dispatch.remote_sandbox import RemoteHost
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.tasks.sandbox.room import SandboxRoom, roomiest
from torchtitan_rl.tasks.sandbox.sandbox import Sandbox

__all__ = ["OwnHost", "RunHosts"]


class _Host(Protocol):
    address: str
    num_cores: int

    @property
    def free_bytes(self) -> int: ...

    @property
    def is_lost(self) -> bool: ...

    def opened(self, config: SandboxConfig, *, gateway: str) -> AbstractAsyncContextManager[Sandbox]: ...


@dataclass(kw_only=True, slots=True)
class OwnHost:
    """The controller's host, where sandboxes are below the controller's process."""

    num_cores: int
    address: str = "this host"
    is_lost: bool = False

    @property
    def free_bytes(self) -> int:
        return psutil.virtual_memory().available

    def opened(self, config: SandboxConfig, *, gateway: str) -> AbstractAsyncContextManager[Sandbox]:
        return config.open_here(gateway=gateway)


@dataclass(slots=True)
class _Running:
    """The sandboxes of a host, and the memory that they may use together."""

    number: int = 0
    allowed_bytes: int = 0


@dataclass(slots=True)
class RunHosts:
    """Opens each sandbox on the host with the most room. Implements `tasks.sandbox.registry.SandboxHosts`."""

    own: OwnHost
    remote: Sequence[RemoteHost]
    _running: dict[str, _Running] = field(default_factory=dict)
    """By the host's address."""

    @asynccontextmanager
    async def opened(self, config: SandboxConfig, *, gateway: str) -> AsyncIterator[Sandbox]:
        host = self._roomiest(config, gateway)
        running = self._running.setdefault(host.address, _Running())
        running.number += 1
        running.allowed_bytes += config.limits.memory_bytes
        try:
            async with host.opened(config, gateway=gateway) as sandbox:
                yield sandbox
        finally:
            running.number -= 1
            running.allowed_bytes -= config.limits.memory_bytes

    def num_running(self) -> dict[str, int]:
        """How many sandboxes are open on each host, by its address."""
        return {address: running.number for address, running in self._running.items()}

    async def close(self) -> None:
        """Ends every sandbox on other hosts."""
        await asyncio.gather(*(host.close() for host in self.remote))

    def _roomiest(self, config: SandboxConfig, gateway: str) -> _Host:
        """Of equals one that is not the controller's own, which has the controller to run. A command of kind `none`
        has the network of its host, and the gateway is on the controller's."""
        if gateway and config.kind == "none":
            return self.own
        hosts: list[_Host] = [*self.remote, self.own]
        return hosts[roomiest([self._room(host) for host in hosts], config.limits.memory_bytes)]

    def _room(self, host: _Host) -> SandboxRoom | None:
        if host.is_lost:
            return None
        running = self._running.get(host.address, _Running())
        return SandboxRoom(
            num_cores=host.num_cores,
            free_bytes=host.free_bytes,
            num_running=running.number,
            allowed_bytes=running.allowed_bytes,
        )

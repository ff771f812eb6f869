"""The hosts on which the sandboxes of a run are opened, where a run has several.

A task, a judge or a reward calls `SandboxConfig.open` and knows of no run, so the hosts cannot be an argument of that
call. The launcher that has started them registers them here, once, for the event loop of its controller, and takes them
back when it stops. `SandboxConfig.open` asks here, and nothing else does. Code on another event loop, such as a plain
reward function in a thread that calls `asyncio.run`, and code in another process have no hosts: their sandboxes open
where they are called.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torchtitan_rl.tasks.sandbox.sandbox import Sandbox

__all__ = ["SandboxHosts", "hosts_of_run", "register", "unregister"]


class SandboxHosts(Protocol):
    """Opens sandboxes on the hosts of a run. Implemented by `dispatch.sandbox_hosts.RunHosts`."""

    def opened(self, config: Any, *, gateway: str) -> AbstractAsyncContextManager[Sandbox]:
        """An empty sandbox on the host with the most room, closed after the block. `config` is a `SandboxConfig`,
        `gateway` as of its `open`. Raises SandboxError where it does not start."""


_hosts: WeakKeyDictionary[asyncio.AbstractEventLoop, SandboxHosts] = WeakKeyDictionary()


def register(hosts: SandboxHosts) -> None:
    """Has sandboxes opened on `hosts` from now on, by what runs on this event loop. Raises RuntimeError where another
    run of this loop has hosts."""
    loop = asyncio.get_running_loop()
    if loop in _hosts:
        raise RuntimeError(
            "sandbox: another run of this event loop has hosts for sandboxes; close its controller first"
        )
    _hosts[loop] = hosts


def unregister(hosts: SandboxHosts) -> None:
    """Takes back `register`."""
    for loop, registered in list(_hosts.items()):
        if registered is hosts:
            del _hosts[loop]


def hosts_of_run() -> SandboxHosts | None:
    """The hosts for sandboxes of the run on this event loop; None: sandboxes open in this process."""
    return _hosts.get(asyncio.get_running_loop())

"""Where the sandboxes of a run on several hosts go: an actor is started on each host but the controller's own."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import psutil

from torchtitan_rl import platform
from torchtitan_rl.actors.sandbox_host import SandboxHost
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.remote_sandbox import RemoteHost
from torchtitan_rl.dispatch.role_mesh import deadline
from torchtitan_rl.dispatch.sandbox_hosts import OwnHost, RunHosts
from torchtitan_rl.launch.attach import Hosts
from torchtitan_rl.launch.inventory import Place
from torchtitan_rl.tasks.sandbox.config import SandboxConfig

__all__ = ["is_this_machine", "sandboxes_of", "start_sandbox_hosts"]


async def start_sandbox_hosts(
    config: RunConfig,
    hosts: Hosts,
    spawn: Callable[[str, int, Place], Awaitable[Any]],
    *,
    timeout_s: float,
    log_dir: str | None = None,
) -> RunHosts | None:
    """The hosts on which the sandboxes of a run are opened; None for a run whose config has no sandbox, and for one on
    the controller's host alone. `spawn(name, ranks, place)` starts processes, which log into `log_dir`.

    Raises RuntimeError naming a host that cannot run the sandboxes or does not answer within `timeout_s`.
    """
    if not hosts.attached or not (configs := sandboxes_of(config)):
        return None
    remote = [index for index, host in enumerate(hosts.hosts) if not is_this_machine(host.address)]
    if not remote:
        return None

    async def start(index: int) -> tuple[int, Any, int]:
        """The index of a host, its actor, and its free memory in bytes."""
        name, label = f"sandboxes-{index}", f"host {hosts.hosts[index].address}: sandboxes"
        actor = (await spawn(name, 1, Place(hosts=[index], devices=[""]))).spawn(name, SandboxHost, name, log_dir)
        if problem := await deadline(actor.problem.call_one(configs), timeout_s, label):
            raise RuntimeError(f"host {hosts.hosts[index].address}: {problem}")
        free_bytes, _ = await deadline(actor.collect.call_one(), timeout_s, label)
        return index, actor, free_bytes

    started = await asyncio.gather(*map(start, remote))
    return RunHosts(
        OwnHost(num_cores=platform.num_cores()),
        [
            RemoteHost(hosts.hosts[index].address, actor, num_cores=hosts.hosts[index].num_cores, free_bytes=free_bytes)
            for index, actor, free_bytes in started
        ],
    )


def is_this_machine(address: str) -> bool:
    """Whether HOST:PORT is an address of an interface of this machine."""
    try:
        number = socket.gethostbyname(address.rpartition(":")[0])
    except OSError:
        return False
    return any(number == own.address for addresses in psutil.net_if_addrs().values() for own in addresses)


def sandboxes_of(config: RunConfig) -> dict[str, SandboxConfig]:
    """The sandboxes that a config holds, in its tasks and its workflow, by the names of their settings. What code of
    the user's makes when it runs is not among them."""
    sandboxes: dict[str, SandboxConfig] = {}
    seen: set[int] = set()

    def look(name: str, value: Any) -> None:
        if isinstance(value, SandboxConfig):
            sandboxes[name] = value
        elif id(value) not in seen:
            seen.add(id(value))
            for part, content in _parts(value):
                look(f"{name}.{part}" if name and part else name or part, content)

    look("", config)
    return sandboxes


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value of a config is made of, by name; a workflow that wraps another one has no name for it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        yield from ((str(name), content) for name, content in value.items())
    elif isinstance(value, list | tuple):
        yield from ((str(index), content) for index, content in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif callable(value):
        yield from (("", content) for name in ("__wrapped__", "workflow") if (content := getattr(value, name, None)))

"""Which sandbox commands run in, and its limits."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.tasks.sandbox import bubblewrap, registry
from torchtitan_rl.tasks.sandbox.bubblewrap import Bubblewrap
from torchtitan_rl.tasks.sandbox.plain import Plain, no_isolation
from torchtitan_rl.tasks.sandbox.sandbox import Connect, Limits, Sandbox

__all__ = ["SandboxConfig"]


@dataclass(kw_only=True, slots=True)
class SandboxConfig:
    """Where commands of agents and of rewards run; docs/sandbox.md. Example: `SandboxConfig(kind="bubblewrap")`."""

    kind: Literal["none", "bubblewrap"] = "none"
    """`none`: a process of the same user, with its files and its network. `bubblewrap`: namespaces of its own, a
    read-only view of programs, and no network but the gateway."""
    memory_gib: float = 1.0
    """Memory: of each process, and in `bubblewrap` of all processes of the sandbox together."""
    max_disk_mib: float = 256.0
    """Files, and each file. In `bubblewrap` they are in memory."""
    max_output_mib: float = 1.0
    """Standard output and error of a command together."""
    max_processes: int = 64
    """Processes at once; in `bubblewrap` threads count too."""
    cpu_s: float = 600.0
    """CPU time of each process; only in `bubblewrap`."""
    read_only: tuple[str, ...] = ()
    """Further files and directories of this machine that commands in `bubblewrap` may read, at the same paths: an
    agent's program, a data set."""

    def __post_init__(self) -> None:
        if self.kind not in ("none", "bubblewrap"):
            raise ValueError(f"sandbox.kind={self.kind!r}: there is no such kind; use none or bubblewrap")
        for name in ("memory_gib", "max_disk_mib", "max_output_mib", "max_processes", "cpu_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"sandbox.{name}={value}: allows nothing, or has no bound; use a number above 0")

    def problem(self) -> str:
        """Why this machine cannot run such a sandbox, with what to do; empty where it can. Takes 0.1 s once."""
        return bubblewrap.problem() if self.kind == "bubblewrap" else ""

    def check(self, setting: str) -> None:
        """Raises RuntimeError, which begins with `setting`, where this machine cannot run such a sandbox, and
        ValueError for a path of `read_only` that cannot be shown."""
        if self.kind == "bubblewrap":
            bubblewrap.visible(self.read_only)
        if reason := self.problem():
            raise RuntimeError(f"{setting}.kind={self.kind!r}: {reason}")

    @property
    def limits(self) -> Limits:
        return Limits(
            memory_bytes=int(self.memory_gib * 2**30),
            disk_bytes=int(self.max_disk_mib * 2**20),
            output_bytes=int(self.max_output_mib * 2**20),
            processes=self.max_processes,
            cpu_s=self.cpu_s,
        )

    @asynccontextmanager
    async def open(self, files: Mapping[str, bytes] | None = None, *, gateway: str = "") -> AsyncIterator[Sandbox]:
        """A sandbox with `files` by name, closed after the block, on the host of the run with the most room. `gateway`
        is a URL of this machine that commands may reach: at its address and port, in `bubblewrap` nothing else. Raises
        SandboxError where it does not start."""
        hosts = registry.hosts_of_run()
        opened = self.open_here(gateway=gateway) if hosts is None else hosts.opened(self, gateway=gateway)
        async with opened as sandbox:
            if files:
                await sandbox.write(files)
            yield sandbox

    @asynccontextmanager
    async def open_here(self, *, gateway: str = "", connect: Connect | None = None) -> AsyncIterator[Sandbox]:
        """An empty sandbox below this process, closed after the block. `connect` reaches the gateway; None: at its
        address."""
        sandbox: Sandbox
        if self.kind == "bubblewrap":
            sandbox = await Bubblewrap.start(self.limits, read_only=self.read_only, gateway=gateway, connect=connect)
        else:
            sandbox = Plain(self.limits, isolated=not no_isolation())
        try:
            yield sandbox
        finally:
            await sandbox.close()

"""Which sandbox commands run in, and its limits."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.tasks.sandbox import bubblewrap, container, registry
from torchtitan_rl.tasks.sandbox.bubblewrap import Bubblewrap
from torchtitan_rl.tasks.sandbox.container import Container, ContainerOptions
from torchtitan_rl.tasks.sandbox.outside import readable_paths
from torchtitan_rl.tasks.sandbox.plain import Plain, no_isolation
from torchtitan_rl.tasks.sandbox.sandbox import Connect, Sandbox, SandboxLimits

__all__ = ["SandboxConfig", "check_each"]

_KINDS = ("none", "bubblewrap", "docker", "podman")


@dataclass(kw_only=True, slots=True)
class SandboxConfig:
    """Where commands of agents and of rewards run; docs/sandbox.md. Example: `SandboxConfig(kind="bubblewrap")`."""

    kind: Literal["none", "bubblewrap", "docker", "podman"] = "none"
    """`none`: a process of the same user, with its files and its network. `bubblewrap`: namespaces of its own, a
    read-only view of programs, and no network but the gateway. `docker`, `podman`: a container of `image`, and no
    network but the gateway."""
    image: str = ""
    """The image of a container, which must be on this machine: nothing is pulled. It needs Python 3.9 or later."""
    python: str = "python3"
    """The image's Python, by its name on the image's PATH or by its path."""
    writable_root: bool = False
    """Whether commands in a container may write to their own copy of the image's files, such as /testbed; otherwise to
    /tmp alone. What they write there is on the engine's disk."""
    memory_gib: float = 1.0
    """Memory: of each process, and but for `none` of all processes of the sandbox together."""
    max_disk_mib: float = 256.0
    """Files, and each file. But for `none` they are in memory, unless `writable_root`."""
    max_output_mib: float = 1.0
    """Standard output and error of a command together."""
    max_processes: int = 64
    """Processes at once; but for `none` threads count too."""
    cpu_s: float = 600.0
    """CPU time of each process; not in `none`."""
    read_only: tuple[str, ...] = ()
    """Further files and directories of this machine that commands may read, at the same paths: an agent's program, a
    data set. In `none` they read all that the user does."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"sandbox.kind={self.kind!r}: there is no such kind; use {', '.join(_KINDS)}")
        if self.is_container and (not self.image or self.image.startswith("-")):
            raise ValueError(f"sandbox.image={self.image!r}: is no image, and kind {self.kind!r} runs one; name it")
        if not self.is_container and self.image:
            raise ValueError(f"sandbox.image={self.image!r}: kind {self.kind!r} runs no image; use docker or podman")
        for name in ("memory_gib", "max_disk_mib", "max_output_mib", "max_processes", "cpu_s"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"sandbox.{name}={value}: allows nothing, or has no bound; use a number above 0")

        if not isinstance(self.max_processes, int):
            raise ValueError(f"sandbox.max_processes={self.max_processes}: is no whole number; use one above 0")

    @property
    def is_container(self) -> bool:
        return self.kind in ("docker", "podman")

    def problem(self) -> str:
        """Why this machine cannot run such a sandbox, with what to do; empty where it can. Takes 0.1 s once, and for
        each image a second."""
        if self.is_container:
            return container.problem(self._options(), self.limits)
        return bubblewrap.problem() if self.kind == "bubblewrap" else ""

    def check(self, setting: str) -> None:
        """Raises RuntimeError, which begins with `setting`, where this machine cannot run such a sandbox, and
        ValueError for a path of `read_only` that cannot be shown."""
        if self.kind != "none":
            readable_paths(self.read_only)
        if reason := self.problem():
            raise RuntimeError(f"{setting}.kind={self.kind!r}: {reason}")

    @property
    def limits(self) -> SandboxLimits:
        return SandboxLimits(
            memory_bytes=int(self.memory_gib * 2**30),
            disk_bytes=int(self.max_disk_mib * 2**20),
            output_bytes=int(self.max_output_mib * 2**20),
            processes=self.max_processes,
            cpu_s=self.cpu_s,
        )

    @asynccontextmanager
    async def open(self, files: Mapping[str, bytes] | None = None, *, gateway: str = "") -> AsyncIterator[Sandbox]:
        """A sandbox with `files` by name, closed after the block, on the host of the run with the most room. `gateway`
        is a URL of this machine that commands may reach: at its address and port, and but for `none` nothing else.
        Raises SandboxError where it does not start."""
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
        if self.is_container:
            sandbox = await Container.start(self._options(), self.limits, gateway=gateway, connect=connect)
        elif self.kind == "bubblewrap":
            sandbox = await Bubblewrap.start(self.limits, read_only=self.read_only, gateway=gateway, connect=connect)
        else:
            sandbox = Plain(self.limits, isolated=not no_isolation())
        try:
            yield sandbox
        finally:
            await sandbox.close()

    def _options(self) -> ContainerOptions:
        return ContainerOptions(
            engine=self.kind,
            image=self.image,
            python=self.python,
            writable_root=self.writable_root,
            read_only=tuple(self.read_only),
        )


def check_each(configs: Iterable[SandboxConfig], setting: str) -> None:
    """Checks the sandboxes of many tasks: one of each sort as `SandboxConfig.check` does, and of the others that their
    images are there. Raises what `check` raises."""
    images: dict[tuple, dict[str, None]] = {}
    for config in configs:
        sort = (config.kind, config.python, config.writable_root, tuple(config.read_only))
        if sort not in images:
            config.check(setting)
        images.setdefault(sort, {})[config.image] = None
    for (kind, *_), names in images.items():
        if kind in ("docker", "podman") and (image := container.missing_image(kind, list(names))):
            raise RuntimeError(
                f"{setting}.image={image!r}: there is no such image on this machine; get it before the run: "
                f"{kind} pull {image}"
            )

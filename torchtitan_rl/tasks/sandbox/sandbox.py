"""A sandbox as its users see it: files go in, commands run, files come out."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Connect", "Finished", "SandboxLimits", "Sandbox", "SandboxError", "check_name"]


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
"""Opens a connection to the gateway. Raises OSError where there is none."""


class SandboxError(RuntimeError):
    """A sandbox that cannot be started, has broken, or holds something else than the file that was asked for."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SandboxLimits:
    """What the commands of one sandbox may use: the numbers of a `SandboxConfig` in bytes and seconds."""

    memory_bytes: int
    disk_bytes: int
    output_bytes: int
    processes: int
    cpu_s: float


@dataclass(kw_only=True, slots=True, frozen=True)
class Finished:
    """How a command ended. Example: `Finished(status=0, stdout=b"ok\\n", stderr=b"")`."""

    status: int
    """Exit status; negative: the number of the signal that ended it, 9 at a limit."""
    stdout: bytes
    stderr: bytes
    """What it wrote; with `limit="output"`, what it wrote until then."""
    limit: str = ""
    """The limit at which the sandbox killed it: `time`, `output`, `memory`, `disk`, `processes`; empty: none. A command
    that the kernel refuses memory, processes or file space ends by itself."""

    def tail(self) -> str:
        """The last lines of what it wrote, for a message."""
        lines = (self.stdout + self.stderr)[-2000:].decode(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-3:])[-500:] or "it wrote nothing"


class Sandbox(Protocol):
    """A private directory and the commands that run in it, one at a time: a second waits for the first. A call that is
    cancelled may break the sandbox. `SandboxConfig.open` starts one.

    Implemented by `plain.Plain`, `bubblewrap.Bubblewrap`, `container.Container` and, for one on another host,
    `dispatch.remote_sandbox.RemoteSandbox`."""

    directory: str
    """The private directory, as commands see it."""
    python: str
    """The Python that commands may start: this process's, or an image's own."""
    limits: SandboxLimits

    async def write(self, files: Mapping[str, bytes]) -> None:
        """Writes files by their names below `directory`, in place of what has these names. Raises SandboxError where a
        directory of a name is a link or a file."""

    async def run(
        self, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: str = "."
    ) -> Finished:
        """Runs a command in `cwd` below `directory`, which is made where it does not exist, with nothing but `env`,
        HOME and TMPDIR (both `cwd` unless `env` has them), PATH, the language and what an image sets in its
        environment. Every process that it started has ended when this returns. A command that cannot be started has
        status 127. Raises SandboxError for a sandbox that has broken, and for surroundings that cannot be made: a
        `cwd` that is a file, limits that the kernel refuses."""

    async def read(self, name: str, *, max_bytes: int = 2**20) -> bytes | None:
        """The content of a file below `directory`; None: there is none. Raises SandboxError for a link, for what is no
        plain file, and for more than `max_bytes`."""

    async def close(self) -> None:
        """Ends what runs and removes the directory."""


def check_name(name: str) -> str:
    """`name`, which is relative to a sandbox's directory and stays below it. Raises ValueError for any other."""
    if not name or "\0" in name or name.startswith("/") or posixpath.normpath(name) != name or name.startswith(".."):
        raise ValueError(
            f"sandbox: file={name!r}: is no name below the sandbox's directory; use one such as 'tests/a.py'"
        )
    return name

"""Kind `bubblewrap`: commands in namespaces of their own, with a read-only view of programs and no network but the
gateway's port.

    controller ── bwrap ── process 1 (inside.py) ── commands
        └── outside.py: one socket pair ──┘

What commands write is in memory (tmpfs), so nothing is left behind when the sandbox ends, however it ends: with the
controller, bwrap gets SIGKILL from the kernel and process 1 reads the end of its socket; with process 1 the kernel ends
every process of the sandbox. https://github.com/containers/bubblewrap
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchtitan_rl.tasks.sandbox import inside, seccomp
from torchtitan_rl.tasks.sandbox.outside import ANSWER_S, Process1, readable_paths
from torchtitan_rl.tasks.sandbox.sandbox import Connect, Finished, SandboxError, SandboxLimits

__all__ = ["Bubblewrap", "problem", "visible"]

logger = logging.getLogger(__name__)

_START_S = 30.0
_WITHOUT_SIGNALS = ("/bin/sh", "-c", 'trap "" TERM INT; exec "$@"', "sh")
"""Starts bwrap, and with it process 1, with SIGTERM and SIGINT ignored: a scheduler or a terminal sends them to every
process of a run and means the controller."""
_ROOT_DIRECTORIES = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ENVIRONMENT = {"PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "mime.types", "ssl/certs")
"""What programs read of /etc, and what holds no secret."""


@functools.cache
def problem() -> str:
    """Why bubblewrap cannot run commands here, with what to do; empty where it can. Takes 0.1 s once."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces; use Linux, or kind 'none'"
    if platform.machine() not in seccomp.MACHINES:
        return f"its filter of system calls is known for {' and '.join(seccomp.MACHINES)} only; use kind 'none'"
    if tuple(int(part) for part in platform.release().split(".")[:2] if part.isdecimal()) < (5, 14):
        return f"Linux {platform.release()} counts processes per user and not per namespace; use 5.14 or later"
    if shutil.which("bwrap") is None:
        return "bwrap is not installed; install bubblewrap (apt install bubblewrap, dnf install bubblewrap)"
    try:
        with _filter() as filter_file:
            line = [*_command_line(visible(()), filter_file.fileno()), sys.executable, "-I", "-S", "-c", ""]
            done = subprocess.run(
                line, capture_output=True, text=True, timeout=_START_S, pass_fds=[filter_file.fileno()], env={}
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run ({error}); mend its installation"
    if done.returncode:
        reason = done.stderr.strip() or f"exit status {done.returncode}"
        return f"bwrap cannot make a sandbox here ({reason}); allow unprivileged user namespaces on this machine"
    return ""


class Bubblewrap:
    """One sandbox; `start` makes it."""

    directory = inside.DIRECTORY
    python = sys.executable

    def __init__(self, limits: SandboxLimits, process: asyncio.subprocess.Process, process_1: Process1) -> None:
        self.limits, self._process, self._process_1 = limits, process, process_1

    @classmethod
    async def start(
        cls, limits: SandboxLimits, *, read_only: Sequence[str] = (), gateway: str = "", connect: Connect | None = None
    ) -> Bubblewrap:
        """A sandbox in which nothing runs yet. `connect` reaches the gateway; None: at its address. Raises SandboxError
        where bwrap does not start, ValueError for a path of `read_only` that does not exist."""
        paths = visible(read_only)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs, _filter() as filter_file:
            number = theirs.fileno()
            code = (
                f"import sys; sys.path.append({os.path.dirname(inside.__file__)!r}); import inside; "
                f"inside.main({number})"
            )
            line = [
                *_WITHOUT_SIGNALS,
                *_command_line(paths, filter_file.fileno(), disk_bytes=limits.disk_bytes),
                *(sys.executable, "-I", "-S", "-c", code),
            ]
            try:
                process = await asyncio.create_subprocess_exec(
                    *line,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    env={},
                    pass_fds=[number, filter_file.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise SandboxError(f"sandbox: bwrap cannot be started ({error}); {problem()}") from error
        try:
            async with asyncio.timeout(_START_S):
                process_1 = await Process1.meet(
                    ours, limits, env=_ENVIRONMENT, gateway=gateway, connect=connect, user=_user()
                )
        except BaseException as error:
            ours.close()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            _, written = await process.communicate()
            if not isinstance(error, EOFError | OSError | TimeoutError):
                raise
            reason = written.decode(errors="replace").strip()[-500:] or repr(error)
            raise SandboxError(f"sandbox: did not start ({reason})") from error
        return cls(limits, process, process_1)

    async def write(self, files: Mapping[str, bytes]) -> None:
        await self._process_1.write(files)

    async def run(
        self, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: str = "."
    ) -> Finished:
        return await self._process_1.run(command, timeout_s=timeout_s, env=env, cwd=cwd)

    async def read(self, name: str, *, max_bytes: int = 2**20) -> bytes | None:
        return await self._process_1.read(name, max_bytes=max_bytes)

    async def close(self) -> None:
        """Ends process 1 by closing its socket, and waits until the kernel has ended the rest."""
        await self._process_1.close()
        try:
            await asyncio.wait_for(self._process.wait(), ANSWER_S)
        except TimeoutError:
            logger.warning("sandbox: did not end within %g s; its processes are killed from outside", ANSWER_S)
        finally:
            if self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


def _user() -> int:
    """The user that a sandbox of root's runs as, one that owns nothing; 0: the controller's own, in a namespace."""
    return 0 if os.geteuid() else inside.FIRST_USER + random.SystemRandom().randrange(inside.NUM_USERS)


def _filter() -> Any:
    """An open file with the filter of system calls."""
    file = tempfile.TemporaryFile()
    file.write(seccomp.program())
    file.seek(0)
    return file


def _command_line(paths: Sequence[Path], filter_descriptor: int, *, disk_bytes: int = 1 << 20) -> list[str]:
    """bwrap and its options, up to the command, which sees `paths`."""
    bwrap = shutil.which("bwrap") or "bwrap"
    line = [bwrap, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid():
        line += ["--unshare-user", "--disable-userns", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    else:  # process 1 becomes another user and has no rights from then on
        line += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    line += ["--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    for name in _ROOT_DIRECTORIES:
        path = Path("/", name)
        if path.is_symlink():
            line += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            line += ["--ro-bind", str(path), str(path)]
    line += ["--dir", "/etc"]  # made beside a file it would be closed to other users
    for name in _ETC:
        line += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    shm = str(min(disk_bytes, 64 << 20))
    line += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", shm, "--tmpfs", "/dev/shm"]
    line += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/tmp"]
    for path in paths:
        for parent in reversed(path.parents[:-1]):
            line += ["--dir", str(parent)]
        line += ["--ro-bind", str(path), str(path)]
    line += ["--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", str(filter_descriptor), "--"]
    return line


def visible(read_only: Sequence[str]) -> list[Path]:
    """Directories of this machine that a sandbox sees at their own paths: programs, Python with its packages, and those
    of the config; none that lies in another. Raises ValueError for a path that does not exist or is the sandbox's."""
    paths = {Path("/usr"), Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]}
    paths.add(Path(inside.__file__).parent)
    paths.update(readable_paths(read_only))
    return sorted(path for path in paths if not any(parent in paths for parent in path.parents))

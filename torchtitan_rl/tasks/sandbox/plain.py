"""Kind `none`: a directory and a tree of processes, with limits, and nothing left behind.

In namespaces of its own (see tasks/process_tree.py) a command sees neither processes nor files of other attempts, so it
reads no other key and writes no other reward. This is no sandbox all the same: the command runs as the user who runs
the controller, and reads what else that user may read.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from torchtitan_rl.tasks import process_tree
from torchtitan_rl.tasks.sandbox.sandbox import Finished, SandboxError, SandboxLimits, check_name

__all__ = ["Plain", "no_isolation"]

_LOOK_EVERY_S = 0.25
_END_S = 40.0
"""Seconds for a supervisor to kill what is below it."""
_MARK = "TORCHTITAN_RL_SANDBOX"
"""Variable that every process of a sandbox has inherited, unless it took care not to."""


@functools.cache
def no_isolation() -> str:
    """Why commands cannot have namespaces of their own on this machine; empty where they can. Takes 0.1 s once."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    directory = _directory()
    try:
        line = process_tree.command_line(str(directory), ["sh", "-c", ":"], cwd=str(directory), isolated=True)
        done = subprocess.run(line, capture_output=True, text=True, timeout=30)
        return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    finally:
        _remove(directory)


class Plain:
    """A directory below the one for temporary files, and commands in it."""

    python = sys.executable

    def __init__(self, limits: SandboxLimits, *, isolated: bool) -> None:
        self.limits, self._isolated, self._mark = limits, isolated, uuid.uuid4().hex
        self._directory, self._one_command = _directory(), asyncio.Lock()
        self.directory = str(self._directory)

    async def write(self, files: Mapping[str, bytes]) -> None:
        for name, content in files.items():
            path = self._below(check_name(name))
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                path.write_bytes(content)
            except OSError as error:
                raise SandboxError(f"sandbox: {name!r} cannot be written ({error.strerror})") from error

    async def run(
        self, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: str = "."
    ) -> Finished:
        home = self._below(check_name(cwd))
        try:
            home.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxError(f"sandbox: cwd={cwd!r} cannot be made ({error.strerror}); name a directory") from error
        async with self._one_command:
            with tempfile.TemporaryFile() as started:
                return await self._run(command, home, dict(env or {}), timeout_s, started)

    async def _run(
        self, command: Sequence[str], home: Path, env: dict[str, str], timeout_s: float, started: IO[bytes]
    ) -> Finished:
        line = process_tree.command_line(
            self.directory,
            list(command),
            cwd=str(home),
            isolated=self._isolated,
            memory_bytes=self.limits.memory_bytes,
            file_bytes=self.limits.disk_bytes,
            started=started.fileno(),
        )
        try:
            process = await asyncio.create_subprocess_exec(
                *line,
                cwd=home,
                env=_environment() | {"HOME": str(home), "TMPDIR": str(home), _MARK: self._mark} | env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[started.fileno()],
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno != errno.E2BIG:
                raise SandboxError(f"sandbox: its supervisor cannot be started ({error.strerror})") from error
            # A word or a variable is too long or has a NUL.
            return Finished(status=127, stdout=b"", stderr=f"{command[0]!r} cannot be started: {error}\n".encode())
        output = _Output(self.limits.output_bytes)
        try:
            limit = await self._watched(process, output, timeout_s)
        finally:
            await self._ended(process)
        status = -signal.SIGKILL if limit else process.returncode
        finished = Finished(status=status, stdout=bytes(output.stdout), stderr=bytes(output.stderr), limit=limit)
        if not limit and not os.fstat(started.fileno()).st_size:
            raise SandboxError(f"sandbox: the surroundings of {command[0]!r} cannot be made ({finished.tail()})")
        return finished

    async def read(self, name: str, *, max_bytes: int = 2**20) -> bytes | None:
        path = self._below(check_name(name))
        try:
            # Not a link into the machine's files, and no pipe that would never end.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SandboxError(f"sandbox: {name!r} cannot be read ({error.strerror})") from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise SandboxError(f"sandbox: {name!r} is no plain file")
        with os.fdopen(descriptor, "rb") as opened:
            content = opened.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise SandboxError(f"sandbox: {name!r} has more than {max_bytes} bytes")
        return content

    async def close(self) -> None:
        await asyncio.to_thread(_remove, self._directory)

    def _below(self, name: str) -> Path:
        """The path of a name. Raises SandboxError where a directory of it is a link: a command may have made one."""
        path = self._directory
        for part in Path(name).parent.parts:
            path = path / part
            if path.is_symlink():
                raise SandboxError(f"sandbox: {name!r} lies behind a link")
        return self._directory / name

    async def _watched(self, process: asyncio.subprocess.Process, output: _Output, timeout_s: float) -> str:
        """Waits until the command has ended, or until it exceeds a limit, which is returned."""
        reads = [
            asyncio.ensure_future(output.read(process.stdout, output.stdout)),
            asyncio.ensure_future(output.read(process.stderr, output.stderr)),
        ]
        ends = [asyncio.ensure_future(process.wait()), asyncio.ensure_future(self._exceeded(process))]
        waits: set[asyncio.Future] = {*reads, *ends}
        try:
            async with asyncio.timeout(timeout_s):
                while process.returncode is None:
                    done, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    for wait in done:
                        if isinstance(limit := wait.result(), str) and limit:
                            return limit
                return next(filter(None, await asyncio.gather(*reads)), "")  # what it wrote last
        except TimeoutError:
            return "time"
        finally:
            for wait in (*reads, *ends):
                wait.cancel()
            await asyncio.gather(*reads, *ends, return_exceptions=True)

    async def _exceeded(self, process: asyncio.subprocess.Process) -> str:
        """The limit of processes or files that the command exceeds; empty: none. Looks until the command has ended,
        also where a process of the command still holds the pipe open."""
        while process.returncode is None:
            await asyncio.sleep(_LOOK_EVERY_S)
            first = int(self._isolated)  # process 1 of its namespace is none of the command's
            if len(process_tree.descendants(process.pid, _parents())) > self.limits.processes + first:
                return "processes"
            if await asyncio.to_thread(_size, self._directory) > self.limits.disk_bytes:
                return "disk"
        return ""

    async def _ended(self, process: asyncio.subprocess.Process) -> None:
        """Has the supervisor kill what is left of a command. Where the command has killed its supervisor, whatever has
        the sandbox's mark is killed."""
        if process.returncode is None:
            process.send_signal(process_tree.STOP)
            # The pipes first: asyncio says that a process has ended once its pipes have, and nobody reads them now.
            for number in (1, 2):
                process._transport.get_pipe_transport(number).close()  # type: ignore[attr-defined]
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_S)
        if process.returncode is not None and process.returncode >= 0:
            return
        for _ in range(20):
            if not (left := await asyncio.to_thread(_with_mark, self._mark)):
                break
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.01)
        await process.wait()


class _Output:
    """What a command wrote, up to a limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.stdout, self.stderr = max_bytes, bytearray(), bytearray()

    async def read(self, pipe: asyncio.StreamReader, content: bytearray) -> str:
        """Reads a pipe to its end, or to the limit, which is returned."""
        while part := await pipe.read(65536):
            left = self._max_bytes - len(self.stdout) - len(self.stderr)
            content += part[: max(0, left)]
            if len(part) > left:
                return "output"
        return ""


def _directory() -> Path:
    """A new directory, below one for the commands of all of this user's runs: a command in namespaces of its own sees
    no other directory below that. Raises RuntimeError where another user has taken the name."""
    parent = Path(tempfile.gettempdir()).resolve() / f"torchtitan-rl-agents-{os.geteuid()}"
    while True:
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        try:
            status = parent.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise RuntimeError(f"directory={str(parent)!r}: belongs to another user; set TMPDIR to one of your own")
            return Path(tempfile.mkdtemp(prefix="agent-", dir=parent))
        except FileNotFoundError:  # another run has removed the empty parent
            continue


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():  # a directory that may not be written, such as one of Go's modules, cannot be emptied
        with suppress(OSError):
            directory.chmod(0o700)
        for parent, names, _ in os.walk(directory):
            for inner in (Path(parent) / name for name in names):
                if not inner.is_symlink():
                    with suppress(OSError):
                        inner.chmod(0o700)
        shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):  # another attempt has its directory there
        directory.parent.rmdir()


def _environment() -> dict[str, str]:
    """Nothing of the controller's environment but where programs are and which letters a terminal has: it may hold
    secrets."""
    return {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}


_seen: tuple[float, dict[int, int]] = (0.0, {})


def _parents() -> dict[int, int]:
    """The parent of each process of this machine, at most a fraction of a second old."""
    global _seen
    if time.monotonic() - _seen[0] >= _LOOK_EVERY_S / 2:
        _seen = time.monotonic(), process_tree.parents()
    return _seen[1]


def _size(directory: Path) -> int:
    """Bytes of a directory's files. A directory that its owner, this user, has closed is opened: who cannot list a
    directory may write files in it."""
    size = 0

    def open_again(error: OSError) -> None:
        nonlocal size
        if isinstance(error, PermissionError):
            with suppress(OSError):
                os.chmod(error.filename, 0o700)
                size += _size(Path(error.filename))

    for at, _, files in os.walk(directory, onerror=open_again):
        for name in files:
            with suppress(OSError):
                size += os.lstat(os.path.join(at, name)).st_blocks * 512
    return size


def _with_mark(mark: str) -> list[int]:
    """Processes that inherited the mark; zombies have no environment."""
    entry, pids = f"{_MARK}={mark}".encode(), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if entry in Path("/proc", name, "environ").read_bytes().split(b"\0"):
                    pids.append(int(name))
    return pids

"""Kinds `docker` and `podman`: commands in a container of an image, without a network but the gateway's port.

    controller ── engine run ── container: process 1 (inside.py, by the image's python3) ── commands
        └── outside.py: a socket in a directory that the container sees at its start ──┘

The container is detached: the engine keeps it, and removes it when process 1 ends. Process 1 ends with its socket, so
with the controller too, however that ends; where the controller has gone before they met, the socket refuses. Nothing
is ever pulled from a registry. https://docs.podman.io/en/latest/markdown/podman-run.1.html,
https://docs.docker.com/reference/cli/docker/container/run/
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.tasks.sandbox import inside, seccomp
from torchtitan_rl.tasks.sandbox.outside import ANSWER_S, Process1, readable_paths
from torchtitan_rl.tasks.sandbox.sandbox import Connect, Finished, SandboxError, SandboxLimits

__all__ = ["Container", "ContainerOptions", "command_line", "missing_image", "problem"]

logger = logging.getLogger(__name__)

_START_S = 60.0
_ENGINE_S = 60.0
"""Seconds for the engine to answer a question."""
_SHM_BYTES = 64 << 20
_OWN_BYTES = 128 << 20
"""Memory of the container that is neither its commands' nor its files': process 1, /dev, the kernel's."""
_IMAGES_AT_ONCE = 50
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
"""Of commands, where the image sets nothing."""
_REACH = {
    "docker": "start its service (systemctl start docker), and let this user use it (group docker, or rootless docker)",
    "podman": "mend its installation; a user who is not root needs newuidmap (apt install uidmap) and rows in "
    "/etc/subuid and /etc/subgid (usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER)",
}
_PROBE = """
import sys
if sys.version_info < (3, 9):
    sys.exit("its Python is %d.%d, and process 1 needs 3.9 or later; name another one of the image's (python)"
        % sys.version_info[:2])
try:
    import _signal, _socket, ctypes, marshal, os, resource, select, socket, stat, struct, time
except ImportError as error:
    sys.exit("its Python lacks a part of the standard library (%s); install it whole" % error)
processes, memory = ("pids.max", "pids/pids.max"), ("memory.max", "memory/memory.limit_in_bytes")
for names, limit in (processes, sys.argv[1]), (memory, sys.argv[2]):
    for name in names:  # of control groups v2, v1
        try:
            with open("/sys/fs/cgroup/" + name) as file:
                value = file.read().strip()
        except OSError:
            continue
        if value.isdigit() and int(value) <= int(limit):
            break
    else:
        sys.exit("the engine sets no %s; a rootless engine needs control groups v2, with these controllers delegated "
            "to its user" % names[0])
"""
"""Runs in a container as a start's does, and says what would be wrong."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ContainerOptions:
    """What a container is made from: the fields of a `SandboxConfig` that other kinds do not have."""

    engine: str
    """`docker` or `podman`."""
    image: str
    python: str
    writable_root: bool
    read_only: tuple[str, ...]


_without_problem: set[ContainerOptions] = set()


def problem(options: ContainerOptions, limits: SandboxLimits) -> str:
    """Why this machine cannot run such a container, with what to do; empty where it can. Starts two, once for each set
    of options: a second with podman."""
    engine, image = options.engine, options.image
    if options in _without_problem:
        return ""
    if sys.platform != "linux":
        return f"{sys.platform} runs containers in a virtual machine, out of a socket's reach; use Linux"
    if platform.machine() not in seccomp.MACHINES:
        return f"its filter of system calls is known for {' and '.join(seccomp.MACHINES)} only; use kind 'none'"
    if shutil.which(engine) is None:
        package = "docker.io" if engine == "docker" else "podman"
        return f"{engine} is not installed; install it (apt install {package}, dnf install {engine})"
    done = _answer(engine, "info", "--format", "{{json .}}")
    if done.returncode:
        return f"{engine} is not reachable ({_reason(done)}); {_REACH[engine]}"
    if missing_image(engine, [image]):
        return f"there is no image {image!r} on this machine; get it before the run: {engine} pull {image}"
    with _meeting_place() as (shared, _):
        line = command_line(options, limits, name=_name(), shared=shared, detached=False)
        try:
            done = _answer(*line, "-c", _PROBE, str(_processes(limits)), str(_memory_bytes(limits)))
        except OSError as error:
            return f"{engine} does not run ({error}); mend its installation"
    if done.returncode in (126, 127):
        return (
            f"image {image!r} has no program {options.python!r} that runs ({_reason(done)}), which process 1 needs; "
            "add python3 to the image, or name another Python of it (python)"
        )
    if done.returncode == 1:
        return f"image {image!r}: {_reason(done)}"
    if done.returncode:
        return f"{engine} cannot start a container here ({_reason(done)}); mend its installation"
    try:
        with ThreadPoolExecutor(1) as pool:  # the caller's thread may be in an event loop
            pool.submit(asyncio.run, _started_and_closed(options, limits)).result()
    except SandboxError as error:
        return f"process 1 of a container does not reach this process ({error}); use an engine of this machine"
    _without_problem.add(options)
    return ""


def missing_image(engine: str, images: Sequence[str]) -> str:
    """The first of these images that the engine does not have; empty where it has them all."""
    for first in range(0, len(images), _IMAGES_AT_ONCE):
        some = images[first : first + _IMAGES_AT_ONCE]
        if _answer(engine, "image", "inspect", "--format", "{{.Id}}", *some).returncode:
            for image in some:
                if _answer(engine, "image", "inspect", "--format", "{{.Id}}", image).returncode:
                    return image
    return ""


class Container:
    """One sandbox; `start` makes it."""

    directory = inside.DIRECTORY

    def __init__(
        self,
        options: ContainerOptions,
        limits: SandboxLimits,
        name: str,
        process_1: Process1,
        pidfd: int,
        launch: asyncio.Task[str],
    ) -> None:
        self.limits, self.python = limits, options.python
        self._engine, self._name, self._process_1, self._pidfd = options.engine, name, process_1, pidfd
        self._launch = launch

    @classmethod
    async def start(
        cls, options: ContainerOptions, limits: SandboxLimits, *, gateway: str = "", connect: Connect | None = None
    ) -> Container:
        """A sandbox in which nothing runs yet. `connect` reaches the gateway; None: at its address. Raises SandboxError
        where the engine does not start it, ValueError for a path of `read_only` that does not exist."""
        name, failed = _name(), ExitStack()
        with _meeting_place() as (shared, listening):
            line = command_line(options, limits, name=name, shared=shared)
            launch = asyncio.create_task(_launched(line))
            try:
                async with asyncio.timeout(_START_S):
                    stream = await _accepted(listening, launch)
                    failed.callback(stream.close)
                    pidfd = _pidfd(stream)
                    failed.callback(os.close, pidfd)
                    process_1 = await Process1.meet(
                        stream,
                        limits,
                        env=_ENVIRONMENT,
                        gateway=gateway,
                        connect=connect,
                        filter_program=seccomp.program(),
                        container=True,
                        writable_root=options.writable_root,
                    )
            except BaseException as error:
                failed.close()
                await asyncio.shield(_abandoned(options.engine, name, launch))
                if not isinstance(error, EOFError | OSError | TimeoutError | SandboxError):
                    raise
                reason = str(error) or f"process 1 did not answer within {_START_S:g} s"
                raise SandboxError(f"sandbox: did not start ({reason})") from error
        return cls(options, limits, name, process_1, pidfd, launch)

    async def write(self, files: Mapping[str, bytes]) -> None:
        await self._process_1.write(files)

    async def run(
        self, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, cwd: str = "."
    ) -> Finished:
        return await self._process_1.run(command, timeout_s=timeout_s, env=env, cwd=cwd)

    async def read(self, name: str, *, max_bytes: int = 2**20) -> bytes | None:
        return await self._process_1.read(name, max_bytes=max_bytes)

    async def close(self) -> None:
        """Ends process 1 by closing its socket, and waits until the kernel has ended the rest. The engine then removes
        the container, within a second."""
        await self._process_1.close()
        try:
            await asyncio.wait_for(_ended(self._pidfd), ANSWER_S)
            await asyncio.wait_for(self._launch, _ENGINE_S)
        except TimeoutError:
            logger.warning("sandbox: container %s did not end within %g s; it is removed", self._name, ANSWER_S)
            await _abandoned(self._engine, self._name, self._launch)
        finally:
            os.close(self._pidfd)


def command_line(
    options: ContainerOptions, limits: SandboxLimits, *, name: str, shared: str, detached: bool = True
) -> list[str]:
    """The engine with its options and the image's Python, which runs process 1; not detached: Python alone, for words
    that follow."""
    podman = options.engine == "podman"
    line = [options.engine, "run", "--rm", "--pull=never", "--name", name]
    line += ["--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
    line += ["--security-opt", "label=disable"]  # SELinux would keep the container from a socket of this process
    line += ["--pids-limit", str(_processes(limits))]
    memory = f"{_memory_bytes(limits)}b"
    line += ["--memory", memory, "--memory-swap", memory]  # the sum of memory and swap: no swap
    line += ["--shm-size", f"{min(limits.disk_bytes, _SHM_BYTES)}b"]
    tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_bytes}"
    line += ["--tmpfs", f"/tmp:{tmpfs},notmpcopyup" if podman else f"/tmp:{tmpfs}"]
    line += ["--hostname", "sandbox", "--workdir", "/", "--log-driver", "none", "--no-healthcheck"]
    if podman:  # what docker does not do unasked
        line += ["--http-proxy=false", "--image-volume=ignore"]
    if not options.writable_root:
        line += ["--read-only", *(["--read-only-tmpfs=false"] if podman else [])]
    line += ["--mount", f"type=bind,source={shared},destination={inside.MOUNT},readonly"]
    for path in readable_paths(options.read_only):
        if "," in str(path):
            raise ValueError(f"sandbox.read_only={str(path)!r}: has a comma, which no engine can be given; rename it")
        line += ["--mount", f"type=bind,source={path},destination={path},readonly"]
    if detached:
        line.append("--detach")
    line += ["--entrypoint", options.python, options.image, "-I", "-S"]
    if detached:
        line += [f"{inside.MOUNT}/inside.py", f"{inside.MOUNT}/socket"]
    return line


def _processes(limits: SandboxLimits) -> int:
    """Of a command, and process 1."""
    return limits.processes + 1


def _memory_bytes(limits: SandboxLimits) -> int:
    """Memory of a whole container, of which its files are a part. `limits.memory_bytes` are looked at by process 1."""
    return limits.memory_bytes + limits.disk_bytes + _OWN_BYTES


def _name() -> str:
    return f"torchtitan-rl-{uuid.uuid4().hex}"


@contextmanager
def _meeting_place() -> Iterator[tuple[str, socket.socket]]:
    """A directory for a container to see, with inside.py and a socket that listens; removed after the block. It is open
    to whatever user the image has, within one that is closed to other users of this machine."""
    parent = Path(tempfile.mkdtemp(prefix="torchtitan-rl-sandbox-"))
    try:
        shared = parent / "shared"
        shared.mkdir()
        shared.chmod(0o755)
        shutil.copyfile(inside.__file__, shared / "inside.py")
        (shared / "inside.py").chmod(0o644)
        with socket.socket(socket.AF_UNIX) as listening:
            at = os.open(shared, os.O_RDONLY | os.O_DIRECTORY)
            try:
                listening.bind(f"/proc/self/fd/{at}/socket")  # a socket's path has at most 107 bytes
            finally:
                os.close(at)
            (shared / "socket").chmod(0o666)
            listening.listen(1)
            listening.setblocking(False)
            yield str(shared), listening
    finally:
        shutil.rmtree(parent, ignore_errors=True)


async def _launched(line: list[str]) -> str:
    """Runs the engine until the container has started. Returns why it has not; empty where it has."""
    try:
        process = await asyncio.create_subprocess_exec(
            *line, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
    except OSError as error:
        return f"{line[0]} cannot be started: {error}"
    try:
        _, written = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    if process.returncode == 0:
        return ""
    return _last_lines(written.decode(errors="replace")) or f"{line[0]} ended with status {process.returncode}"


async def _accepted(listening: socket.socket, launch: asyncio.Task[str]) -> socket.socket:
    """The socket of process 1. Raises SandboxError where the engine fails to start it."""
    met = asyncio.ensure_future(asyncio.get_running_loop().sock_accept(listening))
    try:
        await asyncio.wait({met, launch}, return_when=asyncio.FIRST_COMPLETED)
        if not met.done() and (reason := launch.result()):
            raise SandboxError(reason)
        stream, _ = await met
        return stream
    finally:
        met.cancel()


def _pidfd(stream: socket.socket) -> int:
    """A descriptor of process 1, which tells when it has ended. Raises SandboxError where it is not of this machine."""
    pid, _, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if pid <= 0:
        raise SandboxError("its processes are out of this process's sight; run this on the machine of the engine")
    return os.pidfd_open(pid)


async def _ended(pidfd: int) -> None:
    """Waits until a process has ended; of a container's process 1, the kernel has ended the rest by then."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)


async def _abandoned(engine: str, name: str, launch: asyncio.Task[str]) -> None:
    """Ends a start, and removes its container if there is one."""
    launch.cancel()
    await asyncio.gather(launch, return_exceptions=True)
    try:
        await asyncio.wait_for(_launched([engine, "rm", "--force", name]), _ENGINE_S)
    except TimeoutError:
        logger.warning("sandbox: %s did not remove container %s within %g s", engine, name, _ENGINE_S)


async def _started_and_closed(options: ContainerOptions, limits: SandboxLimits) -> None:
    await (await Container.start(options, limits)).close()


def _answer(*line: str) -> subprocess.CompletedProcess[str]:
    """Raises OSError."""
    try:
        return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ENGINE_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(line, 125, "", f"no answer within {_ENGINE_S:g} s")


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    return _last_lines(done.stderr) or f"exit status {done.returncode}"


def _last_lines(text: str) -> str:
    lines = (line.strip() for line in text.strip().splitlines())
    return " | ".join([line for line in lines if line and not line.startswith("Run '")][-3:])[-500:]

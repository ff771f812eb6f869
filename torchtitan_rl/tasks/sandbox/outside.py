"""The controller's side of process 1 (inside.py), whatever started it: requests and answers over one socket, and the
relay to the gateway.

    controller ── socket ── process 1 ── commands
        │  files, commands, their ends │
        └── accepts on a socket that listens inside, and passes bytes to the gateway
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from torchtitan_rl.tasks.sandbox import inside
from torchtitan_rl.tasks.sandbox.sandbox import Connect, Finished, SandboxError, SandboxLimits, check_name

__all__ = ["ANSWER_S", "Process1", "readable_paths"]

logger = logging.getLogger(__name__)

ANSWER_S = 30.0
"""Seconds beyond a command's own for the sandbox to answer: a hundred killed processes take long on a busy machine."""
_MAX_CONNECTIONS = 64
"""Connections from one sandbox to the gateway at once."""
_OWN = {Path(name) for name in ("/", "/tmp", "/proc", "/dev", "/dev/shm", "/sys", inside.MOUNT)}


def readable_paths(read_only: Sequence[str]) -> list[Path]:
    """The paths of `SandboxConfig.read_only`. Raises ValueError for one that does not exist or is the sandbox's own."""
    paths = []
    for name in read_only:
        path = Path(name).absolute()
        if not path.exists():
            raise ValueError(f"sandbox.read_only={name!r}: does not exist; give files and directories of this machine")
        if path in _OWN:
            raise ValueError(f"sandbox.read_only={name!r}: is the sandbox's own; give a directory below it")
        paths.append(path)
    return paths


class Process1:
    """Process 1 of a sandbox, as the controller drives it; `meet` makes it."""

    def __init__(self, channel: _Channel, relay: _GatewayRelay | None, env: Mapping[str, str]) -> None:
        self._channel, self._relay, self._env = channel, relay, env
        self._one_request, self._cancelled = asyncio.Lock(), False

    @classmethod
    async def meet(
        cls,
        stream: socket.socket,
        limits: SandboxLimits,
        *,
        env: Mapping[str, str],
        gateway: str = "",
        connect: Connect | None = None,
        user: int = 0,
        filter_program: bytes = b"",
        container: bool = False,
        writable_root: bool = False,
    ) -> Process1:
        """Sends process 1 its settings, over a socket that it has the other end of, and waits until it is ready.

        `env` is the environment of commands where nothing else sets a variable. `connect` reaches the gateway; None: at
        its address. `user`: whom process 1 becomes; 0:
        nobody else. `filter_program`: the system calls that it gives up, as `seccomp.program` has them.
        `container`: an engine started it, and limits its processes. `writable_root`: so it looks at what commands write
        there. Raises EOFError or OSError where it ends before it is ready.
        """
        address = urlsplit(gateway)
        connect = connect or partial(asyncio.open_connection, address.hostname, address.port)
        settings = {
            "user": user,
            "port": address.port or 0,
            "filter": filter_program,
            "container": container,
            "writable_root": writable_root,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "output_bytes": limits.output_bytes,
            "processes": limits.processes,
            "cpu_s": limits.cpu_s,
        }
        channel, listening = await _Channel.open(stream, settings)
        relay = None if listening is None else await _GatewayRelay.open(listening, connect)
        return cls(channel, relay, env)

    async def write(self, files: Mapping[str, bytes]) -> None:
        content = {check_name(name): bytes(content) for name, content in files.items()}
        status, problem, _, _ = await self._ask({"files": content}, within_s=ANSWER_S)
        if status:
            raise SandboxError(f"sandbox: {problem}")

    async def run(
        self, command: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None, cwd: str
    ) -> Finished:
        request = {
            "command": list(command),
            "default_env": dict(self._env),
            "env": dict(env or {}),
            "cwd": check_name(cwd),
            "timeout_s": float(timeout_s),
        }
        status, limit, stdout, stderr = await self._ask(request, within_s=timeout_s + ANSWER_S)
        finished = Finished(status=status, stdout=stdout, stderr=stderr, limit=limit)
        if limit == inside.NOT_STARTED:
            raise SandboxError(f"sandbox: the surroundings of {command[0]!r} cannot be made ({finished.tail()})")
        return finished

    async def read(self, name: str, *, max_bytes: int) -> bytes | None:
        request = {"name": check_name(name), "max_bytes": max_bytes}
        status, problem, content, _ = await self._ask(request, within_s=ANSWER_S)
        if status == 1:
            raise SandboxError(f"sandbox: {problem}")
        return None if status == 2 else content

    async def close(self) -> None:
        """Closes the socket, at which process 1 ends, and the relay."""
        self._channel.close()
        if self._relay is not None:
            await self._relay.close()

    async def _ask(self, request: dict[str, Any], *, within_s: float) -> tuple[int, str, bytes, bytes]:
        async with self._one_request:
            if self._cancelled:
                raise SandboxError("sandbox: is closed, because a call was cancelled; give `run` its timeout_s instead")
            try:
                async with asyncio.timeout(within_s):
                    return await self._channel.ask(request)
            except asyncio.CancelledError:
                self._cancelled = True
                self._channel.close()  # an answer of which half has been read
                raise
            except (EOFError, OSError, TimeoutError) as error:
                self._channel.close()
                raise SandboxError(
                    f"sandbox: gave no answer ({type(error).__name__}: {error}); its process 1 has ended or hangs"
                ) from error


class _Channel:
    """The controller's end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, stream: socket.socket, settings: dict[str, Any]) -> tuple[_Channel, socket.socket | None]:
        """Sends the settings and waits until the sandbox is ready. The second value is the socket that listens in it,
        where `settings` have a port."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(stream, inside.encoded(settings))
        ready = asyncio.Event()
        loop.add_reader(stream, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(stream)
        word, descriptors, _, _ = socket.recv_fds(stream, 1, 1)
        if not word:
            raise EOFError("process 1 ended at its start")
        listening = socket.socket(fileno=descriptors[0]) if descriptors else None
        return cls(*await asyncio.open_unix_connection(sock=stream)), listening

    async def ask(self, request: dict[str, Any]) -> tuple[int, str, bytes, bytes]:
        """The status and the three parts of an answer."""
        self._writer.write(inside.encoded(request))
        await self._writer.drain()
        status, *sizes = inside.ANSWER.unpack(await self._reader.readexactly(inside.ANSWER.size))
        text, content, second = [await self._reader.readexactly(size) for size in sizes]
        return status, text.decode(errors="replace"), content, second

    def close(self) -> None:
        self._writer.close()


class _GatewayRelay:
    """Connections from within a sandbox, passed on to the gateway byte by byte."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task] = set()

    @classmethod
    async def open(cls, listening: socket.socket, connect: Connect) -> _GatewayRelay:
        relay = cls(connect)
        relay._server = await asyncio.start_server(relay._forward, sock=listening)
        return relay

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        self._connections.add(connection)
        onward: asyncio.StreamWriter | None = None
        try:
            back, onward = await self._connect()
            async with asyncio.TaskGroup() as both:
                both.create_task(_copy_bytes(reader, onward))
                both.create_task(_copy_bytes(back, writer))
        except* OSError:  # one side has gone away
            pass
        finally:
            self._connections.discard(connection)
            for end in (writer, onward):
                if end is not None:
                    end.close()


async def _copy_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
        await writer.drain()
    writer.write_eof()

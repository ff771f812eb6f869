"""Byte streams as messages: connections from sandboxes on another host to the gateway.

The gateway listens on the controller's loopback, where no other host reaches it. So the bytes of a connection travel in
the calls that the controller makes to the host's actor, and no port is opened for them:

    command -> door -> Streams of the actor == messages ==> Streams of the controller -> gateway

The actor's end opens streams, the controller's end connects each to the gateway of the sandbox that it is of. An end
sends at most 256 KiB of a stream that the other end has not written on, so a reader that is slow stops its own stream
alone.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torchtitan_rl.tasks.sandbox.sandbox import Connect

__all__ = ["Message", "Streams"]

_PART = 1 << 16
_WINDOW = 1 << 18
"""Bytes of a stream on their way."""

Message = tuple[int, Literal["open", "data", "taken", "end", "gone"], Any]
"""The number of a stream, and: `open`, the number of its sandbox; `data`, bytes; `taken`, how many bytes have been
written on; `end`: no more bytes come; `gone`: the connection is broken."""


@dataclass
class _Stream:
    carried: asyncio.Task
    received: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    """Parts that are to be written on; an empty one ends them."""
    num_waiting: int = 0
    """Bytes that were sent and that the other end has not written on."""
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class Streams:
    """One end of the streams between two processes. What `messages` returns is for `take` of the other end, in order.

    `connect(number)` connects a stream of the sandbox with this number to the gateway; None: the other end opens none.
    """

    def __init__(
        self, connect: Callable[[int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]] | None = None
    ) -> None:
        self._connect = connect
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count()
        self._outgoing: list[Message] = []
        self._ready = asyncio.Event()

    async def open(self, sandbox: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the gateway of a sandbox, by way of the other end."""
        ours, theirs = socket.socketpair()
        number = next(self._numbers)
        self._put(number, "open", sandbox)
        self._carry(number, partial(asyncio.open_unix_connection, sock=ours))
        return await asyncio.open_unix_connection(sock=theirs)

    async def messages(self, within_s: float | None = None) -> list[Message]:
        """What is to be sent, as soon as there is something; [] after `within_s` seconds without anything."""
        if not self._outgoing:
            self._ready.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), within_s)
        messages, self._outgoing = self._outgoing, []
        return messages

    def take(self, messages: Iterable[Message]) -> None:
        """Takes what the other end has sent."""
        for number, kind, content in messages:
            if kind == "open" and self._connect is not None:
                self._carry(number, partial(self._connect, content))
            if (stream := self._streams.get(number)) is None:
                continue  # it has ended here, and the other end does not know yet
            if kind == "data":
                stream.received.put_nowait(content)
            elif kind == "end":
                stream.received.put_nowait(b"")
            elif kind == "taken":
                stream.num_waiting -= content
                stream.taken.set()
            elif kind == "gone":
                stream.carried.cancel()

    async def close(self) -> None:
        """Breaks every stream."""
        carried = [stream.carried for stream in self._streams.values()]
        for task in carried:
            task.cancel()
        await asyncio.gather(*carried, return_exceptions=True)

    def _put(self, number: int, kind: Literal["open", "data", "taken", "end", "gone"], content: Any = None) -> None:
        self._outgoing.append((number, kind, content))
        self._ready.set()

    def _carry(self, number: int, connect: Connect) -> None:
        carried = asyncio.ensure_future(self._carried(number, connect))
        carried.add_done_callback(lambda _: self._streams.pop(number))
        self._streams[number] = _Stream(carried)

    async def _carried(self, number: int, connect: Connect) -> None:
        """Carries a stream to its end, or until one of its sides has gone away."""
        stream, writer = self._streams[number], None
        try:
            reader, writer = await connect()
            async with asyncio.TaskGroup() as both:
                both.create_task(self._send(number, stream, reader))
                both.create_task(self._write_on(number, stream, writer))
        except* OSError:
            self._put(number, "gone")
        finally:
            if writer is not None:
                writer.close()

    async def _send(self, number: int, stream: _Stream, reader: asyncio.StreamReader) -> None:
        while part := await reader.read(_PART):
            self._put(number, "data", part)
            stream.num_waiting += len(part)
            while stream.num_waiting >= _WINDOW:
                stream.taken.clear()
                await stream.taken.wait()
        self._put(number, "end")

    async def _write_on(self, number: int, stream: _Stream, writer: asyncio.StreamWriter) -> None:
        while part := await stream.received.get():
            writer.write(part)
            await writer.drain()
            self._put(number, "taken", len(part))
        writer.write_eof()

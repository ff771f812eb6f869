"""Connections with bounds: bytes of a request besides its body, seconds until its head is there, how many are open."""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Connection", "ConnectionLimits"]

_MAX_PIPELINED = 16
_BODY_PER_FRAME = 8
_REFUSED_TOO = 256


@dataclass(kw_only=True, slots=True, frozen=True)
class ConnectionLimits:
    """Limits of one server, whoever connects."""

    max_connections: int = 8192
    """Connections at once, and at most half of the files that the process may open. Beyond it, the connection that has
    waited longest for a request makes way; where none waits, requests are answered with 503."""
    max_head_bytes: int = 2**16
    """Bytes of a request's line and headers; an eighth of its body's size may be added by the borders of chunks."""
    head_timeout_s: float = 10.0
    """Seconds from the first byte to the last of a line and headers, and from connecting."""
    idle_timeout_s: int = 75
    """Seconds for which a connection waits for its next request."""

    def num_connections(self) -> int:
        return min(self.max_connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, whose parser takes headers of any length and for any time, within `limits`."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits
        self.idle_since = 0.0
        self._num_body = self._num_others = 0
        """Bytes of the request that is being read: of its body, and all others."""
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def waits(self) -> bool:
        """Whether the client has been answered and has not asked again."""
        answered = self.cycle is not None and self.cycle.response_complete
        return answered and self._deadline is None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn narrows asyncio's signature
        self._begin_head()
        above = len(self.connections) - self.limits.num_connections()
        if above > 0:
            waiting = [one for one in self.connections if isinstance(one, Connection) and one.waits]
            if waiting:
                min(waiting, key=lambda connection: connection.idle_since).transport.close()
            elif above > _REFUSED_TOO:
                self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._begin_head()
        self._num_others += len(data)
        super().data_received(data)
        if self._num_others > self.limits.max_head_bytes + self._num_body // _BODY_PER_FRAME:
            self._refuse(b"431 Request Header Fields Too Large", f"longer than {self.limits.max_head_bytes} bytes")

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests at once")  # uvicorn answers 400
        self._end_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_others -= len(body)
        self._num_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._num_others = self._num_body = 0

    def on_response_complete(self) -> None:
        self.idle_since = self.loop.time()
        super().on_response_complete()

    def _begin_head(self) -> None:
        self._deadline = self.loop.call_later(self.limits.head_timeout_s, self._late)

    def _end_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        if self._num_others:
            self._refuse(b"408 Request Timeout", f"not complete after {self.limits.head_timeout_s:g} s")
        else:
            self.transport.close()  # nothing was asked

    def _refuse(self, status: bytes, why: str) -> None:
        """Answers, unless an answer has begun, and ends the connection."""
        self._end_head()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            text = f"headers: are {why}; send them at once and shorter\n".encode()
            self.transport.write(
                b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%b" % (status, len(text), text)
            )
        self.transport.close()

"""Sends a trainer rank's pieces to generator ranks of other hosts: a thread per connection, in the trainer's process.

A request names pieces; the answer is a header and the bytes of the pieces, one after another. A piece goes to each
host once: a second rank of that host is told which rank of its host has the piece or is getting it. Nothing is
encrypted. Who asks for pieces has to know the publication's token, which travels in the manifest.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import socketserver
import struct
import sys
import threading
from typing import Any

import torch

from torchtitan_rl.environment import HOST_ADDRESS
from torchtitan_rl.weights.layout import SharedBuffers, host_name
from torchtitan_rl.weights.pieces import Piece

__all__ = ["PieceServer", "SILENT_S", "own_host", "send_message", "receive_message", "receive"]

logger = logging.getLogger(__name__)

SILENT_S = 10.0
"""Seconds without a byte after which the other side counts as gone; a link that is down for 5 s heals within them. A
reader notices after twice that at the latest: the kernel first hands out what has come before."""
_LENGTH = struct.Struct("!I")
_STEP = 2**22  # bytes of one call to the kernel
_MAX_MESSAGE = 2**24


def own_host() -> str:
    """Tells hosts apart. The address is part of it: two workers of one machine with an address each are two hosts."""
    return f"{host_name()}/{os.environ.get(HOST_ADDRESS, '')}"


class PieceServer:
    """Serves pieces of the versions in `buffers`. Refuses a version that `buffers` has released."""

    def __init__(self, buffers: SharedBuffers) -> None:
        self._buffers = buffers
        self._published: dict[str, tuple[int | str, torch.Tensor, list[Piece]]] = {}
        """By token."""
        self._claims: dict[tuple[str, str], dict[int, list]] = {}
        """By token and host: per piece, the rank of that host that fetches it for all."""
        self._lock = threading.Lock()
        self._server = _Listener((os.environ.get(HOST_ADDRESS, "127.0.0.1"), 0), _Connection)
        self._server.owner = self
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        threading.Thread(target=self._server.serve_forever, args=[0.1], name="pieces", daemon=True).start()

    def offer(self, version: int | str, buffer: torch.Tensor, pieces: list[Piece]) -> str:
        """Serves the pieces of a version from `buffer`; returns the token that requests must have."""
        token = secrets.token_hex(16)
        with self._lock:
            for old in [
                t for t, (v, segment, _) in self._published.items() if v == version or not self._has(v, segment)
            ]:
                del self._published[old]
            self._claims = {key: claims for key, claims in self._claims.items() if key[0] in self._published}
            self._published[token] = version, buffer, pieces
        return token

    def _has(self, version: int | str, buffer: torch.Tensor) -> bool:
        """Whether `buffer` is still the segment of a version."""
        return version in self._buffers.used and self._buffers.used[version][1] is buffer

    def close(self) -> None:
        """Stops listening; connections end with the process or with their clients."""
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[memoryview]]:
        """The header of the answer and the bytes that follow it. `claimed` of the header: the requested pieces that
        another rank of the host fetches already, each with that rank."""
        with self._lock:
            version, buffer, pieces = self._published.get(request["token"], (None, None, []))
            if buffer is None or not self._has(version, buffer):
                return {"error": "has discarded the version"}, []
            claims = self._claims.setdefault((request["token"], request["host"]), {})
            claimed = {}
            for index in request["pieces"]:
                holder = request["holder"] if request["force"] else claims.get(index, request["holder"])
                claims[index] = holder
                if holder != request["holder"]:
                    claimed[index] = holder
        here = [pieces[index] for index in request["pieces"] if index not in claimed]
        data = buffer.numpy().data
        return {"claimed": claimed}, [data[piece.start : piece.start + piece.nbytes] for piece in here]


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads, block_on_close, allow_reuse_address = True, False, True
    request_queue_size = 1024  # all generator ranks connect at once
    owner: PieceServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs the exception of a request, unless its connection failed: the client reports that itself."""
        if not isinstance(sys.exception(), OSError | EOFError):
            logger.exception("pieces: a request of %s failed", client_address)


class _Connection(socketserver.BaseRequestHandler):
    server: _Listener

    def handle(self) -> None:
        limit_silence(self.request)
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))  # clients may pause
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(SILENT_S))
        while (request := receive_message(self.request)) is not None:
            header, parts = self.server.owner.answer(request)
            send_message(self.request, header)
            for part in parts:
                self.request.sendall(part)


def limit_silence(connection: socket.socket) -> None:
    """Makes calls on a blocking connection fail with BlockingIOError once `SILENT_S` have passed without a byte."""
    limit = struct.pack("ll", int(SILENT_S), 0)
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> dict[str, Any] | None:
    """The next message; None when the other side has closed the connection between two messages."""
    length = bytearray(_LENGTH.size)
    try:
        receive(connection, memoryview(length))
    except EOFError:
        return None
    (size,) = _LENGTH.unpack(length)
    if size > _MAX_MESSAGE:
        raise EOFError(f"announced a message of {size} bytes")
    data = bytearray(size)
    receive(connection, memoryview(data))
    return json.loads(data)


def receive(connection: socket.socket, place: memoryview) -> None:
    """Fills `place`. Raises EOFError when the other side has closed the connection, BlockingIOError when it has sent
    nothing for `SILENT_S`."""
    done = 0
    while done < len(place):
        # The kernel fills the whole slice before it wakes this thread, which needs the interpreter's lock then.
        count = connection.recv_into(place[done : done + _STEP], 0, socket.MSG_WAITALL)
        if count == 0:
            raise EOFError("closed the connection")
        done += count

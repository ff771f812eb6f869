"""An HTTP server in the event loop of who opens it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from functools import partial
from typing import Any

import uvicorn

from torchtitan_rl.serve.openai.connections import Connection, ConnectionLimits

__all__ = ["Listening"]

_START_S = 10.0


def require_free(host: str, port: int) -> None:
    """Raises ValueError for an address on which nothing could listen now."""
    _bound(host, port).close()


def _bound(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ValueError for an address that cannot be listened on."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port={port}: is none; use one up to {2**16 - 1}, or 0 for one that is free")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(f"port={port}: cannot listen on {host} ({error}); use another") from error


class Listening(AbstractAsyncContextManager):
    """Serves an application. Open with `async with`; `port` 0 takes one that is free."""

    def __init__(self, app: Any, host: str, port: int, limits: ConnectionLimits | None = None) -> None:
        self.app, self.host, self.port, self.url = app, host, port, ""
        self.limits = limits or ConnectionLimits()
        self._server: _Server | None = None
        self._serving: asyncio.Task | None = None

    async def __aenter__(self) -> Listening:
        """Listens. Raises ValueError for an address that cannot be listened on."""
        bound = _bound(self.host, self.port)
        # asyncio sets TCP_NODELAY only where a socket's protocol number is IPPROTO_TCP; here the number is 0. Without
        # it a kept-alive client waits 40 ms for each answer of two packets. Connections inherit the option.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        self.port = bound.getsockname()[1]
        self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        config = uvicorn.Config(
            self.app,
            http=partial(Connection, limits=self.limits),  # type: ignore[arg-type]  # makes one, as a class does
            limit_concurrency=self.limits.num_connections() + 1,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=self.limits.idle_timeout_s,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="http")
        async with asyncio.timeout(_START_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return 0 if self._server is None else len(self._server.server_state.connections)

    async def close(self) -> None:
        """Ends every connection and the server."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            for task in list(self._server.server_state.tasks):
                task.cancel()
            await self._serving
            self._server = None


class _Server(uvicorn.Server):
    """A server inside of somebody else's event loop: signals stay whose they are."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

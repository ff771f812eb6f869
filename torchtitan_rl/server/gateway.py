"""The gateway: an HTTP server in the event loop of who opens it, and the sessions that are open on it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import uvicorn

from torchtitan_rl.server.app import make_app
from torchtitan_rl.server.doors import Doors, Served
from torchtitan_rl.server.keys import is_loopback
from torchtitan_rl.server.limits import ServerLimits

__all__ = ["Gateway", "Served"]

_START_S = 10.0
_KEEP_ALIVE_S = 75


class Gateway(Doors, AbstractAsyncContextManager):
    """Endpoints as of OpenAI, for sessions and, with `served`, for clients without one. Open with `async with`.

    `context_tokens` bounds a prompt with its completion, `vocab_size` (0: the tokenizer's) the ids of tokens. Clients
    without a session need `api_key` unless it is empty; a session has a key of its own. Raises ValueError for an empty
    key on an address that other machines reach.
    """

    def __init__(
        self,
        *,
        context_tokens: int,
        vocab_size: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str = "",
        served: Served | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        if not api_key and served is not None and not is_loopback(host):
            raise ValueError(f"host={host!r}: other machines reach it, and api_key is empty; give a key")
        super().__init__(
            context_tokens=context_tokens, vocab_size=vocab_size, api_key=api_key, served=served, limits=limits
        )
        self.host, self.port, self.app = host, port, make_app(self)
        self._server: _Server | None = None
        self._serving: asyncio.Task | None = None

    async def __aenter__(self) -> Gateway:
        """Listens. Raises ValueError for an address that cannot be listened on."""
        try:
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            bound = socket.create_server((self.host, self.port), family=family, backlog=2048)
        except OSError as error:
            raise ValueError(f"port={self.port}: cannot listen on {self.host} ({error}); use another") from error
        self.port = bound.getsockname()[1]
        self.url = f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
        config = uvicorn.Config(
            self.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]), name="gateway")
        async with asyncio.timeout(_START_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every session, every connection and the server."""
        for session in list(self.sessions.values()):
            self.end_session(session)
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

"""The gateway: an HTTP server in the event loop of who opens it, and the sessions that are open on it."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager

from torchtitan_rl.serve.guard import Guard, allowed_hosts
from torchtitan_rl.serve.keys import is_loopback
from torchtitan_rl.serve.limits import ServerLimits
from torchtitan_rl.serve.listening import Listening
from torchtitan_rl.serve.openai.app import make_app
from torchtitan_rl.serve.openai.doors import Doors, Served

__all__ = ["Gateway", "Served"]


class Gateway(Doors, AbstractAsyncContextManager):
    """Endpoints as of OpenAI, for sessions and, with `served`, for clients without one. Open with `async with`.

    `context_tokens` bounds a prompt with its completion, `vocab_size` (0: the tokenizer's) the ids of tokens. Clients
    without a session need `api_key` unless it is empty; a session has a key of its own. `allow_hosts` are names of
    this machine besides its loopback's, see `guard.allowed_hosts`. Raises ValueError for an empty key on an address
    that other machines reach.
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
        allow_hosts: Collection[str] = (),
    ) -> None:
        if not api_key and served is not None and not is_loopback(host):
            raise ValueError(f"host={host!r}: other machines reach it, and api_key is empty; give a key")
        super().__init__(
            context_tokens=context_tokens, vocab_size=vocab_size, api_key=api_key, served=served, limits=limits
        )
        needs_key = bool(api_key) or served is None  # without a served model each session has a key
        self.app = Guard(make_app(self), hosts=allowed_hosts(host, needs_key, allow_hosts))
        self._listening = Listening(self.app, host, port)

    @property
    def host(self) -> str:
        return self._listening.host

    @property
    def port(self) -> int:
        return self._listening.port

    async def __aenter__(self) -> Gateway:
        """Listens. Raises ValueError for an address that cannot be listened on."""
        await self._listening.__aenter__()
        self.url = self._listening.url
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every session, every connection and the server."""
        for session in list(self.sessions.values()):
            self.end_session(session)
        await self._listening.close()

"""The gateway: an HTTP server in the event loop of its opener, through which agents and other clients reach a policy.

Clients are agents, each with a session of its own, and with `served` also clients that have no session. `OpenSessions`
says who may ask for what, `serve.routes` speaks HTTP, and `Guard` bounds what comes in before a route sees it.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractAsyncContextManager

from torchtitan_rl.rollout.agent import Endpoint, SessionLimits
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.guard import Guard, allowed_hosts
from torchtitan_rl.serve.keys import is_loopback
from torchtitan_rl.serve.limits import ServerLimits
from torchtitan_rl.serve.listening import Listening
from torchtitan_rl.serve.open_sessions import OpenSessions
from torchtitan_rl.serve.openai.served import Served
from torchtitan_rl.serve.openai.sessions import Session
from torchtitan_rl.serve.routes import answer_of_dialect, application

__all__ = ["Gateway", "Served"]


class Gateway(AbstractAsyncContextManager):
    """Endpoints as of OpenAI and Anthropic, for sessions and, with `served`, for clients without one. Open with
    `async with`.

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
        self.sessions = OpenSessions(
            context_tokens=context_tokens, vocab_size=vocab_size, api_key=api_key, served=served, limits=limits
        )
        needs_key = bool(api_key) or served is None  # without a served model each session has a key
        hosts = allowed_hosts(host, needs_key, allow_hosts)
        self.app = Guard(application(self.sessions), hosts=hosts, answer=answer_of_dialect)
        self._listening = Listening(self.app, host, port)
        self.url = ""
        """Where the gateway listens, such as `http://127.0.0.1:8000`; empty until it does."""

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
        self.sessions.end_all()
        await self._listening.close()

    def open_session(
        self,
        policy: Policy,
        *,
        seed: int,
        limits: SessionLimits,
        model: str = "policy",
        tool_parser: str = "",
        ignored: tuple[str, ...] = (),
    ) -> Session:
        """A session whose completions `policy` samples, with its endpoint, until `end_session`."""
        session = self.sessions.open(
            policy, seed=seed, limits=limits, model=model, tool_parser=tool_parser, ignored=ignored
        )
        session.endpoint = Endpoint(
            base_url=f"{self.url}/sessions/{session.id}/v1",
            api_key=session.secret,
            model=model,
            session_id=session.id,
            seed=seed,
            training=policy.for_training,
            app=self.app,
        )
        return session

    def end_session(self, session: Session) -> None:
        """Nothing is captured, and no request answered, from now on."""
        self.sessions.end(session)

"""Who gets in: the sessions that are open, the policy for clients without one, and keys."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.rollout.agent import Endpoint, SessionLimits
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.keys import check_key
from torchtitan_rl.serve.limits import Rate, ServerLimits
from torchtitan_rl.serve.openai.message_spans import Spans
from torchtitan_rl.serve.openai.rendering import Renderings
from torchtitan_rl.serve.openai.sessions import Session
from torchtitan_rl.serve.openai.tool_calls import ToolReader

logger = logging.getLogger(__name__)

__all__ = ["Doors", "Served", "unknown_model"]


@dataclass(kw_only=True, slots=True)
class Served:
    """What clients without a session meet: one policy, newest or of a version that is published."""

    name: str
    policy: Policy
    versions: Callable[[], list[int]]
    """The versions that can be asked for as `NAME@VERSION`."""
    tool_parser: str = ""
    ignored: tuple[str, ...] = ()
    """Parameters of requests that are left out."""

    def names(self) -> list[str]:
        return [self.name, *(f"{self.name}@{version}" for version in self.versions())]

    def version(self, model: str | None) -> int | None:
        """The version that a name means; None: the newest. Raises Refused (404) for any other name."""
        name, at, version = (self.name if model is None else model).partition("@")
        if name == self.name and not at:
            return None
        if name == self.name and version.isdecimal() and int(version[:18]) in self.versions():
            return int(version)
        raise unknown_model(model, self.names())


class Doors:
    """The sessions of a gateway, and the policy that clients without a session meet."""

    url = ""
    """Where the gateway listens, such as `http://127.0.0.1:8000`."""
    app: Any = None
    """The application behind it."""

    def __init__(
        self,
        *,
        context_tokens: int,
        vocab_size: int = 0,
        api_key: str = "",
        served: Served | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.context_tokens, self.vocab_size, self.api_key, self.served = context_tokens, vocab_size, api_key, served
        self.limits = limits or ServerLimits()
        self.spans, self.renderings, self.sessions = Spans(), Renderings(), dict[str, Session]()
        self._rate, self._places = Rate(self.limits.requests_per_s), self.limits.places()
        self._readers: dict[tuple[str, int], ToolReader] = {}

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
        """A session whose completions `policy` samples, until `end_session`."""
        if len(self.sessions) >= self.limits.max_sessions:
            raise RuntimeError(
                f"gateway: {self.limits.max_sessions} sessions are open; end some, or raise ServerLimits.max_sessions"
            )
        session = Session(
            policy,
            seed=seed,
            context_tokens=self.context_tokens,
            vocab_size=self.vocab_size,
            spans=self.spans,
            renderings=self.renderings,
            limits=limits,
            model=model,
            tool_reader=self.tool_reader(tool_parser, policy.tokenizer),
            ignored=ignored,
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
        self.sessions[session.id] = session
        return session

    def end_session(self, session: Session) -> None:
        """Nothing is captured, and no request answered, from now on."""
        session.closed = True
        self.sessions.pop(session.id, None)

    def tool_reader(self, name: str, tokenizer: Any) -> ToolReader | None:
        if not name:
            return None
        if (name, id(tokenizer)) not in self._readers:
            self._readers[name, id(tokenizer)] = reader = ToolReader(name, tokenizer)
            _warn_of_template(reader)
        return self._readers[name, id(tokenizer)]

    @property
    def ignored(self) -> tuple[str, ...]:
        """Parameters that requests without a session are answered without."""
        return () if self.served is None else self.served.ignored

    @property
    def num_malformed_calls(self) -> int:
        """Completions that began a call of a tool and held none."""
        return sum(reader.num_malformed for reader in self._readers.values())

    def session(self, session_id: str, key: str) -> Session:
        """An open session. Raises Refused for one that is not (404) and for another session's key (401)."""
        session = self.sessions.get(session_id)
        if session is None:
            raise Refused(
                404, f"session {session_id[:80]!r}: is not open; open one, or go on without", code="session_not_found"
            )
        check_key(key, session.secret)
        return session

    def stateless(self, key: str, model: str | None) -> Session:
        """A session for one request of a client that has none. Raises Refused."""
        served = self._served(key)
        self._rate.take()
        policy = served.policy
        if (version := served.version(model)) is not None:
            policy = dataclasses.replace(policy, policy_version=version)
        return Session(
            policy,
            seed=None,
            context_tokens=self.context_tokens,
            vocab_size=self.vocab_size,
            spans=self.spans,
            renderings=self.renderings,
            limits=SessionLimits(max_turns=self.limits.max_choices),
            places=self._places,
            model=model or served.name,
            tool_reader=self.tool_reader(served.tool_parser, policy.tokenizer),
            ignored=served.ignored,
        )

    def models(self, key: str) -> list[str]:
        return self._served(key).names()

    def _served(self, key: str) -> Served:
        if self.served is None:
            raise Refused(404, "this gateway has sessions only: ask below /sessions/ID/v1", code="session_not_found")
        if self.api_key:
            check_key(key, self.api_key)
        return self.served


def _warn_of_template(reader: ToolReader) -> None:
    """Sessions keep the tokens of calls; messages that a client rewrites, and clients without a session, meet the
    template."""
    try:
        if text := reader.check_template():
            logger.warning(
                "tool_parser=%r: reads no such call in what the chat template writes for one, %r; calls that clients "
                "send back have another form than the policy's",
                *(reader.name, text[:200]),
            )
    except ValueError as error:
        logger.warning("%s", error)


def unknown_model(model: str | None, names: list[str]) -> Refused:
    return Refused(
        404,
        f"model={str(model)[:80]!r}: is not served here; use {' or '.join(names[:4])}",
        param="model",
        code="model_not_found",
    )

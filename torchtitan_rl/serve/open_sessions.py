"""The sessions that are open on a gateway, and who may ask for what: no HTTP is here.

An agent has a session of its own, with a key of its own. Clients without a session share one key and what `Served`
offers; each of their requests is a session of one turn.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from torchtitan_rl.rollout.agent import SessionLimits
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.rollout.renderings import Renderings
from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.keys import check_key
from torchtitan_rl.serve.limits import Rate, ServerLimits
from torchtitan_rl.serve.openai.message_spans import MessageSpans
from torchtitan_rl.serve.openai.served import Served
from torchtitan_rl.serve.openai.sessions import Session
from torchtitan_rl.serve.openai.tool_calls import ToolReader
from torchtitan_rl.serve.stored_responses import StoredResponses

__all__ = ["OpenSessions"]

logger = logging.getLogger(__name__)


class OpenSessions:
    """The open sessions of agents, and the policy of clients that have none.

    `context_tokens` bounds a prompt with its completion, `vocab_size` (0: the tokenizer's) the ids of tokens. Clients
    without a session need `api_key` unless it is empty; where `served` is None there are none.
    """

    def __init__(
        self,
        *,
        context_tokens: int,
        vocab_size: int = 0,
        api_key: str = "",
        served: Served | None = None,
        limits: ServerLimits | None = None,
    ) -> None:
        self.context_tokens, self.vocab_size = context_tokens, vocab_size
        self.api_key, self.served, self.limits = api_key, served, limits or ServerLimits()
        self.spans, self.renderings = MessageSpans(), Renderings()
        self._sessions: dict[str, Session] = {}
        self._rate, self._places = Rate(self.limits.requests_per_s), self.limits.places()
        self._stored = dict[str, StoredResponses]()
        """By the session's identity; empty: of the clients without a session."""
        self._readers: dict[tuple[str, int], ToolReader] = {}

    def __len__(self) -> int:
        """How many sessions are open."""
        return len(self._sessions)

    # Sessions of agents.

    def open(
        self,
        policy: Policy,
        *,
        seed: int,
        limits: SessionLimits,
        model: str = "policy",
        tool_parser: str = "",
        ignored: tuple[str, ...] = (),
    ) -> Session:
        """A session whose completions `policy` samples, until `end`. Raises RuntimeError where too many are open."""
        if len(self) >= self.limits.max_sessions:
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
        self._sessions[session.id] = session
        return session

    def end(self, session: Session) -> None:
        """Nothing is captured, and no request answered, from now on."""
        session.closed = True
        self._sessions.pop(session.id, None)
        self._stored.pop(session.id, None)

    def end_all(self) -> None:
        for session in list(self._sessions.values()):
            self.end(session)

    def find(self, session_id: str, key: str) -> Session:
        """An open session. Raises Refused for one that is not (404) and for another session's key (401)."""
        session = self._sessions.get(session_id)
        if session is None:
            raise Refused(
                404, f"session {session_id[:80]!r}: is not open; open one, or go on without", code="session_not_found"
            )
        check_key(key, session.secret)
        return session

    # Clients without a session.

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
            limits=SessionLimits(max_turns=0),  # of its one request, which `_check_size` bounds
            places=self._places,
            model=model or served.name,
            tool_reader=self.tool_reader(served.tool_parser, policy.tokenizer),
            ignored=served.ignored,
        )

    def models(self, key: str) -> list[str]:
        """The names that clients without a session may ask for. Raises Refused."""
        return self._served(key).names()

    def policy_served(self, key: str) -> Policy:
        """The policy of clients without a session. Raises Refused."""
        return self._served(key).policy

    @property
    def ignored(self) -> tuple[str, ...]:
        """Parameters that requests without a session are answered without."""
        return () if self.served is None else self.served.ignored

    def _served(self, key: str) -> Served:
        if self.served is None:
            raise Refused(404, "this gateway has sessions only: ask below /sessions/ID/v1", code="session_not_found")
        if self.api_key:
            check_key(key, self.api_key)
        return self.served

    # Of both.

    def stored(self, session: Session | None) -> StoredResponses:
        """The responses that an open session, or clients without one, may go on from."""
        owner = "" if session is None else session.id
        if owner not in self._stored:
            self._stored[owner] = self.limits.stored()
        return self._stored[owner]

    def tool_reader(self, name: str, tokenizer: Any) -> ToolReader | None:
        if not name:
            return None
        if (name, id(tokenizer)) not in self._readers:
            self._readers[name, id(tokenizer)] = reader = ToolReader(name, tokenizer)
            _warn_of_template(reader)
        return self._readers[name, id(tokenizer)]

    @property
    def num_malformed_calls(self) -> int:
        """Completions that began a call of a tool and held none."""
        return sum(reader.num_malformed for reader in self._readers.values())


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

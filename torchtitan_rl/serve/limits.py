"""How much one client may ask for: bytes of a body and seconds to send it, requests per second, sessions."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass
from typing import NoReturn

from starlette.requests import ClientDisconnect, Request

from torchtitan_rl.serve.errors import Refused
from torchtitan_rl.serve.stored_responses import StoredResponses

__all__ = ["ServerLimits", "Places", "Rate", "read_body"]

_MAX_THROWN_AWAY = 2**26
"""Bytes of a body that is too long which are read all the same: a client that is cut off while it writes sees no
answer."""
_THROWN_AWAY_S = 2.0
"""Seconds for which a body that is too long by its own header is read."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ServerLimits:
    """Limits of one gateway, whoever asks."""

    max_body_bytes: int = 0
    """Bytes of a request's body; 0: 64 KiB and 16 bytes for each token of the context."""
    body_timeout_s: float = 10.0
    """Seconds in which a body has to arrive."""
    max_sessions: int = 8192
    """Sessions that are open at once."""
    requests_per_s: float = 0.0
    """Requests per second of all clients without a session, after a burst of as many as a second allows; 0: no
    limit."""
    max_parallel: int = 1024
    """Completions that clients without a session may wait for at once."""
    max_waiting_tokens: int = 2**23
    """Tokens of the completions that clients without a session wait for at once: of each its prompt and the most that
    it may have."""
    max_choices: int = 128
    """Largest `n`."""
    max_messages: int = 4096
    """Messages of a conversation."""
    max_tools: int = 128
    """Tools of a request, as many as OpenAI takes."""
    max_stored_responses: int = 1024
    """Responses of one session that can be gone on from by `previous_response_id`, and of all clients without a session
    together. The least recently used make way."""
    max_stored_bytes: int = 2**26
    """Bytes of those responses and of their conversations, as JSON."""

    def body_bytes(self, context_tokens: int) -> int:
        return self.max_body_bytes or 65536 + 16 * context_tokens

    def stored(self) -> StoredResponses:
        """Of one session, or of the clients without one."""
        return StoredResponses(self.max_stored_responses, self.max_stored_bytes)

    def places(self) -> Places:
        """Of the clients without a session."""
        return Places(self.max_parallel, self.max_waiting_tokens)


class Places:
    """How many completions are awaited, of how many that may be, and how many tokens they may have; 0: no limit."""

    def __init__(self, number: int, num_tokens: int = 0) -> None:
        self.number, self.num_tokens, self.taken, self.taken_tokens = number, num_tokens, 0, 0

    def take(self, n: int, tokens: int = 0) -> None:
        """Raises Refused when fewer than `n` are left or fewer than `tokens`: 429, or 400 for more tokens than are ever
        free."""
        if self.num_tokens and tokens > self.num_tokens:
            raise Refused(
                400,
                f"n, max_tokens: {n} completions and their prompts may come to {tokens} tokens, and {self.num_tokens} "
                "may be awaited; ask for fewer or shorter ones",
                param="max_tokens",
                code="invalid_value",
            )
        if self.number and self.taken + n > self.number:
            self._refuse(f"{self.taken} completions are awaited, and {self.number} may be")
        if self.num_tokens and self.taken_tokens + tokens > self.num_tokens:
            self._refuse(f"completions of {self.taken_tokens} tokens are awaited, and {self.num_tokens} may be")
        self.taken += n
        self.taken_tokens += tokens

    def give(self, n: int, tokens: int = 0) -> None:
        self.taken -= n
        self.taken_tokens -= tokens

    def _refuse(self, why: str) -> NoReturn:
        raise Refused(429, f"{why}; wait for one", code="rate_limit_exceeded", headers={"Retry-After": "1"})


class Rate:
    """A bucket of tokens: `per_s` requests per second, after a burst of as many; 0: no limit."""

    def __init__(self, per_s: float, *, clock=time.monotonic) -> None:
        self.per_s, self._clock = per_s, clock
        self._burst = max(1.0, per_s)
        self._left, self._at = self._burst, clock()

    def take(self) -> None:
        """Raises Refused (429), with the seconds to wait in `Retry-After`, when the bucket is empty."""
        if not self.per_s:
            return
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self.per_s)
        self._at = now
        if self._left < 1.0:
            wait_s = (1.0 - self._left) / self.per_s
            raise Refused(
                429,
                f"rate limit: {self.per_s:g} requests per second are allowed; wait {wait_s:.2f} s",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(math.ceil(wait_s))},
            )
        self._left -= 1.0


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """The request's body. Raises Refused for a body that is too long (413), late (408) or ends early (400)."""
    parts: list[bytes] = []
    size = 0
    declared = request.headers.get("content-length", "")
    too_long = declared.isdecimal() and int(declared[:18]) > max_bytes
    try:
        async with asyncio.timeout(min(timeout_s, _THROWN_AWAY_S) if too_long else timeout_s):
            async for part in request.stream():
                size += len(part)
                if size <= max_bytes:
                    parts.append(part)
                elif size > _MAX_THROWN_AWAY:
                    break
    except TimeoutError:
        if too_long:
            raise _refused_as_too_long(max_bytes) from None
        raise Refused(
            408,
            f"body: {size} bytes came within {timeout_s:g} s and the rest did not; send the whole body",
            code="timeout",
            headers={"Connection": "close"},
        ) from None
    except ClientDisconnect:
        raise Refused(400, "body: the connection ended before the body did; send the whole body") from None
    if size > max_bytes:
        raise _refused_as_too_long(max_bytes)
    return b"".join(parts)


def _refused_as_too_long(max_bytes: int) -> Refused:
    return Refused(413, f"body: is longer than {max_bytes} bytes; send less", code="request_too_large")

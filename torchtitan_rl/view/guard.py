"""What every request of the page is held to: it only reads, it names this machine, and its answer runs nothing else."""

from __future__ import annotations

from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard"]

_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """An ASGI application around another one. Refuses methods that could write, and names of this machine that another
    site may have given it (DNS rebinding); adds headers that forbid scripts, styles and data of other hosts."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name.encode(): value.encode() for name, value in _HEADERS.items()}
                message["headers"] = [(k, v) for k, v in message["headers"] if k.lower() not in own] + list(own.items())
            await send(message)

        answer: Any = self.app
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if scope["method"] not in ("GET", "HEAD"):
            answer = PlainTextResponse(f"method={scope['method']}: this page only reads; use GET\n", 405)
        elif len(hosts) != 1 or _without_port(hosts[0]) not in _HOSTS:
            answer = PlainTextResponse("host: is not this machine; open the address that the command printed\n", 421)
        await answer(scope, receive, guarded)


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host

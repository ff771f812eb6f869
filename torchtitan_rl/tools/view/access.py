"""What every request of the page is held to: it only reads, and its answer runs nothing else."""

from __future__ import annotations

from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["ReadOnly"]

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


class ReadOnly:
    """An ASGI application around another one. Refuses methods that could write, and adds headers that forbid scripts,
    styles and data of other hosts. Who may ask is the affair of `serve.guard.Guard`."""

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
        if scope["method"] not in ("GET", "HEAD"):
            answer = PlainTextResponse(f"method={scope['method']}: this page only reads; use GET\n", 405)
        await answer(scope, receive, guarded)

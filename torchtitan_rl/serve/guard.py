"""Who may ask a server: programs, and no web page of somebody else's; and how much of what they send may wait."""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torchtitan_rl.serve.errors import Refused, answer
from torchtitan_rl.serve.keys import is_loopback

__all__ = ["Guard", "allowed_hosts", "host_names"]

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_MAX_HEAD_BYTES = 2**16
"""Of a request's line and headers, also where a client in the same process sends them past any connection."""


def allowed_hosts(host: str, needs_key: bool, also: Collection[str] = ()) -> frozenset[str] | None:
    """The names that a `Host` header may have at a server that listens on `host`; None: any.

    Where no key is asked for, only this machine's names and `also` are allowed: another site may give its own name the
    address 127.0.0.1 (DNS rebinding), and the browser then takes the server for a part of that site. A key protects
    from this, because no web page has it.
    """
    if not also and (needs_key or not is_loopback(host)):
        return None
    own = f"[{host}]" if ":" in host else host
    return frozenset((own.lower(), *_LOOPBACK)) | host_names(also)


def host_names(names: Collection[str]) -> frozenset[str]:
    """Names of hosts as they are compared. Raises ValueError for one that has a port or a path, or is empty."""
    if wrong := [name for name in names if not name or "/" in name or _without_port(name) != name]:
        raise ValueError(f"--allow-host={wrong[0]}: is no name of a host; give it without http:// and without a port")
    return frozenset(name.lower() for name in names)


def _openai_answer(refused: Refused, path: str) -> Response:
    return answer(refused)


class Guard:
    """An ASGI application around another one. Refuses, in the form that `answer` makes of a `Refused` and the path:

    - a `Host` that is none of `hosts` (421); None: any, because every request needs a key;
    - a page of another site, by its `Origin` or `Sec-Fetch-Site` (403);
    - with `hosts`, a body of another content type than `types` (415): web pages may send text and forms unasked;
    - a line and headers of more than 64 KiB (431);
    - bodies beyond `max_waiting_bytes` of all requests that are under way (429).

    No answer has CORS headers, so a browser gives no answer to a page of another site, and sends JSON to no server
    that it asked first.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str] | None,
        types: Collection[str] = ("application/json",),
        max_waiting_bytes: int = 2**28,
        answer: Callable[[Refused, str], Response] = _openai_answer,
    ) -> None:
        self.app, self.hosts, self.types, self.max_waiting_bytes = app, hosts, types, max_waiting_bytes
        self._answer = answer
        self.waiting_bytes = 0
        """Of bodies of requests that have no whole answer yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if (refused := self._refusal(scope)) is not None:
            return await self._answer(refused, scope["path"])(scope, receive, send)
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            if message["type"] == "http.request" and (num := len(message.get("body", b""))):
                if self.waiting_bytes + num > self.max_waiting_bytes:
                    raise Refused(
                        429,
                        f"body: the requests under way have {self.waiting_bytes} bytes, and {self.max_waiting_bytes} "
                        "may be; wait for one",
                        code="rate_limit_exceeded",
                        headers={"Retry-After": "1"},
                    )
                size += num
                self.waiting_bytes += num
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self.waiting_bytes -= size

    def _refusal(self, scope: Scope) -> Refused | None:
        """Why a request is refused; None: it is not."""
        line = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        if line + sum(len(name) + len(value) for name, value in scope["headers"]) > _MAX_HEAD_BYTES:
            return Refused(431, f"headers: are longer than {_MAX_HEAD_BYTES} bytes with the address; send less")
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if self.hosts is not None and (len(hosts) != 1 or _without_port(hosts[0]).lower() not in self.hosts):
            return Refused(
                421,
                f"Host={','.join(hosts)[:80]!r}: is no name of this machine; ask for the address that the command "
                "printed, or start it with --allow-host NAME",
                code="misdirected_request",
            )
        if _is_foreign(headers):
            return Refused(
                403,
                f"Origin={headers.get('origin', '')[:80]!r}: a web page of another site asks; ask from a program",
                code="foreign_origin",
            )
        if self.hosts is not None and _has_body(headers):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind not in self.types:
                return Refused(
                    415,
                    f"Content-Type={kind[:80]!r}: is not {' or '.join(self.types)}; send it with the body, as SDKs "
                    f"do, or -H 'Content-Type: {next(iter(self.types))}' with curl",
                    code="unsupported_media_type",
                )
        return None


def _is_foreign(headers: Headers) -> bool:
    """Whether a browser sends the request for a page of another site. Who follows a link comes from another site too,
    and is the person."""
    if (origin := headers.get("origin")) is not None:
        return origin.partition("://")[2] != headers.get("host")
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    return site in ("cross-site", "same-site") and mode != "navigate"


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() else host

"""Routes: each finds its session, reads a body, asks for completions and writes an answer. Nothing is decided here."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from torchtitan_rl.serve.errors import Refused, answer, invalid
from torchtitan_rl.serve.keys import bearer
from torchtitan_rl.serve.limits import ServerLimits, read_body
from torchtitan_rl.serve.openai import responses
from torchtitan_rl.serve.openai.doors import Doors, unknown_model
from torchtitan_rl.serve.openai.requests import ChatRequest, CompletionRequest, RewardRequest, Sampled, parse
from torchtitan_rl.serve.openai.sessions import Answer, Prompt, Session

__all__ = ["make_app"]

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]


def make_app(doors: Doors) -> FastAPI:
    """The application. Every path below `/v1` is there once more below `/sessions/ID`; a header `X-Session-ID` names a
    session too."""
    app = FastAPI(openapi_url=None)
    routes = _Routes(doors)
    for path, handler, methods in (
        ("/v1/models", routes.models, ["GET"]),
        ("/v1/models/{model:path}", routes.models, ["GET"]),
        ("/v1/chat/completions", routes.chat, ["POST"]),
        ("/v1/completions", routes.completions, ["POST"]),
        ("/reward", routes.reward, ["POST"]),
    ):
        app.add_route("/sessions/{session_id}" + path, routes.guarded(handler), methods)
        if path != "/reward":
            app.add_route(path, routes.guarded(handler), methods)
    app.add_route("/healthz", routes.guarded(routes.health), ["GET"])
    app.add_exception_handler(HTTPException, _no_route)
    return app


class _Routes:
    def __init__(self, doors: Doors) -> None:
        self.doors = doors

    def guarded(self, handler: Handler) -> Handler:
        """The handler with refusals as answers, and spans."""
        spans = self.doors.spans

        async def guard(request: Request) -> Response:
            spans.go()
            try:
                response = await handler(request)
            except Refused as refused:
                response = answer(refused)
            except Exception:
                logger.exception("the gateway failed on %s", request.url.path)
                response = answer(Refused(500, "the gateway failed; its log says why", code="internal_error"))
            spans.ended(response.status_code)
            return response

        return guard

    async def chat(self, request: Request) -> Response:
        session, asked = await self._asked(request, ChatRequest)
        said = await self._completed(request, session, asked, lambda: [session.chat_prompt(asked)])
        whole = responses.chat_answer(
            said, asked, asked.model or session.model, f"chatcmpl-{said[0].id}", session.policy.tokenizer
        )
        return _sent(whole, responses.chat_chunks(whole, asked) if asked.stream else None)

    async def completions(self, request: Request) -> Response:
        session, asked = await self._asked(request, CompletionRequest)
        said = await self._completed(request, session, asked, lambda: session.text_prompts(asked))
        whole = responses.completion_answer(
            said, asked, asked.model or session.model, f"cmpl-{said[0].id}", session.policy.tokenizer
        )
        return _sent(whole, responses.completion_chunks(whole, asked) if asked.stream else None)

    async def models(self, request: Request) -> Response:
        """The models, or the one that the path names."""
        key, session = _key(request), self._session(request)
        names = self.doors.models(key) if session is None else [session.model]
        more = {"max_model_len": self.doors.context_tokens}
        listed = responses.model_list(dict.fromkeys(names, more))
        if (wanted := request.path_params.get("model")) is None:
            return _sent(listed)
        if wanted not in names:
            raise unknown_model(wanted, names)
        return _sent(next(model for model in listed["data"] if model["id"] == wanted))

    async def reward(self, request: Request) -> Response:
        """Takes a session's reward; the last one counts. One that is refused makes the attempt fail."""
        session = self._session(request)
        try:
            given, _ = parse(RewardRequest, await self._body(request))
        except Refused as refused:
            session.fault = f"agent: posted a reward that was refused ({refused.message})"
            raise
        session.reward, session.fault = (given.reward, given.parts), ""
        return _sent({"reward": given.reward})

    async def health(self, request: Request) -> Response:
        """Without a key: whether the gateway lives, and what its requests cost."""
        doors = self.doors
        health = {"status": "ok", "num_sessions": len(doors.sessions), "requests": doors.spans.as_dict()}
        return _sent(health | {"num_malformed_calls": doors.num_malformed_calls})

    def _session(self, request: Request) -> Session | None:
        """The session that the path or a header names; None: neither does."""
        named = request.path_params.get("session_id") or request.headers.get("x-session-id")
        return None if named is None else self.doors.session(named, _key(request))

    async def _asked(self, request: Request, kind: type[Sampled]) -> tuple[Session, Any]:
        session, key = self._session(request), _key(request)
        if session is None:
            self.doors.models(key)  # refuses a wrong key before a body is read
        try:
            ignored = self.doors.ignored if session is None else session.ignored
            asked, left_out = parse(kind, await self._body(request), ignored)
            if session is None:
                session = self.doors.stateless(key, asked.model)
            elif asked.model not in (None, session.model):
                raise unknown_model(asked.model, [session.model])
            _check_size(asked, self.doors.limits)
            if left_out:
                session.counts["ignored"] += len(left_out)
            return session, asked
        except Refused:
            if session is not None:
                session.counts["refused"] += 1
            raise

    async def _body(self, request: Request) -> bytes:
        limits, encoding = self.doors.limits, request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise Refused(
                415,
                f"Content-Encoding={encoding[:40]!r}: bodies are not expanded here; send the body as it is",
                code="unsupported_encoding",
            )
        with self.doors.spans.away():
            return await read_body(request, limits.body_bytes(self.doors.context_tokens), limits.body_timeout_s)

    async def _completed(
        self, request: Request, session: Session, asked: Any, prompts: Callable[[], list[Prompt]]
    ) -> list[Answer]:
        """Completions, which become turns of the session unless the client has gone."""
        try:
            said = await session.complete(prompts(), asked)
        except Refused:
            session.counts["refused"] += 1
            raise
        if _has_gone(request):
            session.counts["undelivered"] += len(said)
        else:
            session.keep(said)
        return said


def _check_size(asked: Sampled, limits: ServerLimits) -> None:
    """Raises Refused for a request that asks for more than one may, before anything is rendered."""
    if (asked.n or 1) > limits.max_choices:
        raise invalid(f"n={asked.n}: is more than {limits.max_choices}; ask for fewer", "n")
    for name, most in (("messages", limits.max_messages), ("tools", limits.max_tools), ("prompt", limits.max_parallel)):
        given = getattr(asked, name, None)
        if isinstance(given, list) and len(given) > most and not isinstance(given[0], int):
            raise invalid(f"{name}: has {len(given)} entries, and {most} may be; send fewer", name)


def _has_gone(request: Request) -> bool:
    """Whether the client of a request whose body was read has closed the connection. Asks without waiting: another
    request's turn would come first otherwise."""
    receiving: Any = request.receive()
    try:
        receiving.send(None)
    except StopIteration as received:
        return received.value["type"] == "http.disconnect"
    receiving.close()
    return False


def _key(request: Request) -> str:
    return bearer(request.headers.get("authorization"))


def _sent(content: dict[str, Any], chunks=None) -> Response:
    if chunks is not None:
        return Response(
            responses.event_stream(chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    return Response(json.dumps(content).encode(), media_type="application/json")


async def _no_route(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    what = "is no path of this gateway" if error.status_code == 404 else f"{error.detail}, for method {request.method}"
    path = request.url.path[:120]
    return answer(Refused(error.status_code, f"{path}: {what}; see docs/gateway.md", code="not_found"))

"""The gateway's HTTP: which path does what, and the forms of requests and answers.

A route looks up its session, reads a body, asks the session for completions and writes an answer. Who may ask is
`OpenSessions`'s to say, and what is sampled is the session's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from torchtitan_rl import adapters
from torchtitan_rl.serve.anthropic.anthropic_errors import anthropic_answer
from torchtitan_rl.serve.dialect import Translated
from torchtitan_rl.serve.errors import Refused, answer, invalid
from torchtitan_rl.serve.keys import key_of
from torchtitan_rl.serve.limits import ServerLimits, read_body
from torchtitan_rl.serve.open_sessions import OpenSessions
from torchtitan_rl.serve.openai import responses
from torchtitan_rl.serve.openai.requests import ChatRequest, CompletionRequest, RewardRequest, Sampled, parse
from torchtitan_rl.serve.openai.served import BASE, not_served, unknown_model
from torchtitan_rl.serve.openai.sessions import Answer, Prompt, Session
from torchtitan_rl.serve.openai.stop_texts import stopped_by
from torchtitan_rl.serve.responses.items import item_page
from torchtitan_rl.serve.responses.response_errors import responses_answer
from torchtitan_rl.serve.stored_responses import StoredResponse, StoredResponses

__all__ = ["answer_of_dialect", "application"]

logger = logging.getLogger(__name__)

_MESSAGES = "/v1/messages/"
"""In the paths of Anthropic's dialect, with a session before it or without."""

Handler = Callable[[Request], Awaitable[Response]]
Reader = Callable[[bytes, Collection[str]], tuple[Any, list[str]]]
"""From a body and the ignored parameters to a request, and the parameters that were left out."""


def application(sessions: OpenSessions) -> FastAPI:
    """The application. Every path below `/v1` is there once more below `/sessions/ID`; a header `X-Session-ID` names a
    session too."""
    app = FastAPI(openapi_url=None)
    routes = _Routes(sessions)
    for path, handler, methods, refuse in (
        ("/v1/models", routes.models, ["GET"], answer),
        ("/v1/models/{model:path}", routes.models, ["GET"], answer),
        ("/v1/chat/completions", routes.chat, ["POST"], answer),
        ("/v1/completions", routes.completions, ["POST"], answer),
        ("/v1/messages", routes.messages, ["POST"], anthropic_answer),
        ("/v1/messages/count_tokens", routes.count_tokens, ["POST"], anthropic_answer),
        ("/v1/responses", routes.responses, ["POST"], responses_answer),
        ("/v1/responses/input_tokens", routes.count_input_tokens, ["POST"], responses_answer),
        ("/v1/responses/{response_id}/input_items", routes.input_items, ["GET"], responses_answer),
        ("/v1/responses/{response_id}", routes.stored_response, ["GET", "DELETE"], responses_answer),
        ("/v1/responses/{response_id}/cancel", routes.cancelled_response, ["POST"], responses_answer),
        ("/reward", routes.reward, ["POST"], answer),
    ):
        app.add_route("/sessions/{session_id}" + path, routes.guarded(handler, refuse), methods)
        if path != "/reward":
            app.add_route(path, routes.guarded(handler, refuse), methods)
    app.add_route("/healthz", routes.guarded(routes.health, answer), ["GET"])
    app.add_exception_handler(HTTPException, _no_route)
    return app


class _Routes:
    """Each route looks up its session, reads a body, asks for completions and writes an answer; it decides nothing."""

    def __init__(self, sessions: OpenSessions) -> None:
        self.sessions = sessions
        self._has_dialects = False

    def guarded(self, handler: Handler, refuse: Callable[[Refused], Response]) -> Handler:
        """The handler with refusals as answers, in the form of `refuse`, and spans."""
        spans = self.sessions.spans

        async def guard(request: Request) -> Response:
            spans.go()
            try:
                response = await handler(request)
            except Refused as refused:
                response = refuse(refused)
            except Exception:
                logger.exception("the gateway failed on %s", request.url.path)
                response = refuse(Refused(500, "the gateway failed; its log says why", code="internal_error"))
            spans.ended(response.status_code)
            return response

        return guard

    async def chat(self, request: Request) -> Response:
        session, query = await self._parsed(request, partial(parse, ChatRequest))
        answers = await self._completed(request, session, query, lambda: [session.chat_prompt(query)])
        whole = responses.chat_answer(
            answers, query, query.model or session.model, f"chatcmpl-{answers[0].id}", session.policy.tokenizer
        )
        return _sent(whole, responses.chat_chunks(whole, query) if query.stream else None)

    async def completions(self, request: Request) -> Response:
        session, query = await self._parsed(request, partial(parse, CompletionRequest))
        answers = await self._completed(request, session, query, lambda: session.text_prompts(query))
        whole = responses.completion_answer(
            answers, query, query.model or session.model, f"cmpl-{answers[0].id}", session.policy.tokenizer
        )
        return _sent(whole, responses.completion_chunks(whole, query) if query.stream else None)

    async def messages(self, request: Request) -> Response:
        await self._load_dialects()
        from torchtitan_rl.serve.anthropic import message_events
        from torchtitan_rl.serve.anthropic import requests as anthropic

        anthropic.check_version(request.headers.get("anthropic-version"))
        session, query = await self._parsed(request, partial(anthropic.messages_request, self._tokenizer(request)))
        chat = query.chat
        (reply,) = await self._completed(request, session, chat, lambda: [session.chat_prompt(chat)])
        stop = stopped_by(session.policy.text(reply.completion), chat.stops)
        reply_body = message_events.message(reply, chat.model or session.model, stop)
        if chat.stream:
            return _events(message_events.event_bytes(message_events.message_events(reply_body)))
        return _sent(message_events.whole_message(reply_body))

    async def count_tokens(self, request: Request) -> Response:
        await self._load_dialects()
        from torchtitan_rl.serve.anthropic import requests as anthropic

        anthropic.check_version(request.headers.get("anthropic-version"))
        session, query = await self._parsed(request, partial(anthropic.count_request, self._tokenizer(request)))
        return _sent({"input_tokens": session.count_tokens(query.chat)})

    async def responses(self, request: Request) -> Response:
        await self._load_dialects()
        from torchtitan_rl.serve.responses import response_events
        from torchtitan_rl.serve.responses.requests import responses_request

        stored = self._stored(request)
        session, query = await self._parsed(request, partial(responses_request, stored))
        chat = query.chat
        (reply,) = await self._completed(request, session, chat, lambda: [session.chat_prompt(chat)])
        events = response_events.item_events(reply, query, session.policy.tokenizer)
        reply_body = response_events.response(reply, query, session, events)
        whole = response_events.whole_response(reply_body)
        if query.request.store is not False:
            before = query.conversation
            stored.keep(StoredResponse(whole, [*before.messages, responses.answer_message(reply)], before.items))
        if chat.stream:
            return _events(response_events.event_bytes(response_events.response_events(reply_body, events)))
        return _sent(whole)

    async def count_input_tokens(self, request: Request) -> Response:
        await self._load_dialects()
        from torchtitan_rl.serve.responses.requests import count_request

        session, query = await self._parsed(request, partial(count_request, self._stored(request)))
        return _sent({"object": "response.input_tokens", "input_tokens": session.count_tokens(query.chat)})

    async def input_items(self, request: Request) -> Response:
        """A page of the items that a stored response was made from."""
        return _sent(item_page(self._kept(request).items, request.query_params.multi_items()))

    async def stored_response(self, request: Request) -> Response:
        """A stored response as it was sent, or with DELETE no longer."""
        if name := next(iter(request.query_params), None):
            raise invalid(f"{name[:80]}: is not offered: a response comes whole; leave it out", name[:80])
        kept = self._kept(request)
        if request.method == "GET":
            return _sent(kept.whole)
        self._stored(request).forget(response_id := request.path_params["response_id"])
        return _sent({"id": response_id, "object": "response", "deleted": True})

    async def cancelled_response(self, request: Request) -> Response:
        """Refuses: no response is in the background, so a stored one is done."""
        self._kept(request)
        raise invalid("Cannot cancel a synchronous response: it is done once it can be named")

    async def models(self, request: Request) -> Response:
        """The models, or the one that the path names."""
        key, session = _key(request), self._session(request)
        names = self.sessions.models(key) if session is None else [session.model]
        more = {"max_model_len": self.sessions.context_tokens}
        listed = responses.model_list(dict.fromkeys(names, more))
        if (name := request.path_params.get("model")) is None:
            return _sent(listed)
        if name not in names:
            raise unknown_model(name, names)
        return _sent(next(model for model in listed["data"] if model["id"] == name))

    async def reward(self, request: Request) -> Response:
        """Takes a session's reward; the last one counts. One that is refused makes the attempt fail."""
        session = self._session(request)
        try:
            posted, _ = parse(RewardRequest, await self._body(request))
        except Refused as refused:
            session.fault = f"agent: posted a reward that was refused ({refused.message})"
            raise
        session.reward, session.fault = (posted.reward, posted.parts), ""
        return _sent({"reward": posted.reward})

    async def health(self, request: Request) -> Response:
        """Without a key: whether the gateway lives, and what its requests cost."""
        counts = {"status": "ok", "num_sessions": len(self.sessions), "requests": self.sessions.spans.as_dict()}
        return _sent(counts | {"num_malformed_calls": self.sessions.num_malformed_calls})

    def _session(self, request: Request) -> Session | None:
        """The session that the path or a header names; None: neither does."""
        session_id = request.path_params.get("session_id") or request.headers.get("x-session-id")
        return None if session_id is None else self.sessions.find(session_id, _key(request))

    def _stored(self, request: Request) -> StoredResponses:
        """The stored responses that the client may see. Raises Refused for a wrong key."""
        session = self._session(request)
        if session is None:
            self.sessions.models(_key(request))
        return self.sessions.stored(session)

    def _tokenizer(self, request: Request) -> Any:
        """The tokenizer of the policy that the client asks. Raises Refused for a wrong key."""
        session = self._session(request)
        return (self.sessions.policy_served(_key(request)) if session is None else session.policy).tokenizer

    async def _load_dialects(self) -> None:
        """vLLM's protocol classes: importing vLLM takes seconds, in which other requests are answered."""
        if not self._has_dialects:
            with self.sessions.spans.away():
                await asyncio.to_thread(_import_dialects)
            self._has_dialects = True

    def _kept(self, request: Request) -> StoredResponse:
        """The stored response that the path names. Raises Refused for one that is not stored."""
        response_id, stored = request.path_params["response_id"], self._stored(request)
        if (kept := stored.get(response_id)) is None:
            raise Refused(  # clients know this case by OpenAI's words
                404,
                f"Response with id {response_id[:80]!r} not found. The last {stored.max_responses} are stored, unless "
                "store was false",
                code="response_not_found",
            )
        return kept

    async def _parsed(self, request: Request, read: Reader) -> tuple[Session, Any]:
        session, key = self._session(request), _key(request)
        if session is None:
            self.sessions.models(key)  # refuses a wrong key before a body is read
        try:
            ignored = self.sessions.ignored if session is None else session.ignored
            query, left_out = read(await self._body(request), ignored)
            if session is None:
                session = self.sessions.stateless(key, query.model)
            elif query.model not in (None, session.model):
                raise _not_of_session(query.model, session.model)
            _check_size(query.chat if isinstance(query, Translated) else query, self.sessions.limits)
            if left_out:
                session.counts["ignored"] += len(left_out)
            return session, query
        except Refused:
            if session is not None:
                session.counts["refused"] += 1
            raise

    async def _body(self, request: Request) -> bytes:
        limits, encoding = self.sessions.limits, request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise Refused(
                415,
                f"Content-Encoding={encoding[:40]!r}: bodies are not expanded here; send the body as it is",
                code="unsupported_encoding",
            )
        with self.sessions.spans.away():
            return await read_body(request, limits.body_bytes(self.sessions.context_tokens), limits.body_timeout_s)

    async def _completed(
        self, request: Request, session: Session, query: Any, prompts: Callable[[], list[Prompt]]
    ) -> list[Answer]:
        """Completions, which become turns of the session unless the client has gone."""
        client_gone = asyncio.ensure_future(_gone(request))
        try:
            answers = await session.complete(prompts(), query, client_gone)
        except Refused:
            session.counts["refused"] += not client_gone.done()
            raise
        finally:
            client_gone.cancel()
        if _has_gone(request):
            session.counts["undelivered"] += len(answers)
        else:
            session.keep(answers)
        return answers


def _not_of_session(model: str, own: str) -> Refused:
    """The refusal of another model than a session's own: all turns of a rollout are its policy's."""
    if model == BASE or model.startswith(f"{own}@"):
        return not_served(
            model,
            f"a session's turns may train, and all are of its own policy; use {own}, or ask without a session where "
            "the run is served",
        )
    return unknown_model(model, [own])


def _check_size(query: Sampled, limits: ServerLimits) -> None:
    """Raises Refused for a request that asks for more than one may, before anything is rendered."""
    if (query.n or 1) > limits.max_choices:
        raise invalid(f"n={query.n}: is more than {limits.max_choices}; ask for fewer", "n")
    for name, most in (("messages", limits.max_messages), ("tools", limits.max_tools), ("prompt", limits.max_parallel)):
        entries = getattr(query, name, None)
        if isinstance(entries, list) and len(entries) > most and not isinstance(entries[0], int):
            raise invalid(f"{name}: has {len(entries)} entries, and {most} may be; send fewer", name)
    prompts = getattr(query, "prompt", None)
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        if (num_completions := len(prompts) * (query.n or 1)) > limits.max_parallel:
            raise invalid(
                f"prompt: {len(prompts)} entries with n={query.n} are {num_completions} completions, and "
                f"{limits.max_parallel} may be; send fewer",
                "prompt",
            )


async def _gone(request: Request) -> None:
    """Returns when the client of a request whose body was read has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
    return key_of(request.headers)


def _import_dialects() -> None:
    adapters.prepare_vllm(eager=True)
    import torchtitan_rl.serve.anthropic.message_events
    import torchtitan_rl.serve.anthropic.requests
    import torchtitan_rl.serve.responses.requests
    import torchtitan_rl.serve.responses.response_events  # noqa: F401  they are imported for those who come next


def _sent(content: dict[str, Any], chunks=None) -> Response:
    if chunks is not None:
        return _events(responses.event_stream(chunks))
    return Response(json.dumps(content).encode(), media_type="application/json")


def _events(stream: bytes) -> Response:
    return Response(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _no_route(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    problem = (
        "is no path of this gateway" if error.status_code == 404 else f"{error.detail}, for method {request.method}"
    )
    path = request.url.path[:120]
    refused = Refused(error.status_code, f"{path}: {problem}; see docs/gateway.md", code="not_found")
    return answer_of_dialect(refused, request.url.path)


def answer_of_dialect(refused: Refused, path: str) -> Response:
    """A refusal that no route has made, in the form of the path's dialect."""
    return anthropic_answer(refused) if _MESSAGES in f"{path}/" else answer(refused)

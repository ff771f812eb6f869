"""The gateway: an HTTP server in the event loop of its opener, and the sessions that are open on it.

Clients are agents, each with a session of its own, and with `served` also clients that have no session. The class below
keeps the sessions and decides who gets in; the routes after it speak HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from torchtitan_rl import adapters
from torchtitan_rl.rollout.agent import Endpoint, SessionLimits
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.rollout.renderings import Renderings
from torchtitan_rl.serve.anthropic.anthropic_errors import anthropic_answer
from torchtitan_rl.serve.dialect import Translated
from torchtitan_rl.serve.errors import Refused, answer, invalid
from torchtitan_rl.serve.guard import Guard, allowed_hosts
from torchtitan_rl.serve.keys import check_key, is_loopback, key_of
from torchtitan_rl.serve.limits import Rate, ServerLimits, read_body
from torchtitan_rl.serve.listening import Listening
from torchtitan_rl.serve.openai import responses
from torchtitan_rl.serve.openai.message_spans import MessageSpans
from torchtitan_rl.serve.openai.messages import stopped_by
from torchtitan_rl.serve.openai.requests import ChatRequest, CompletionRequest, RewardRequest, Sampled, parse
from torchtitan_rl.serve.openai.served import BASE, Served, not_served, unknown_model
from torchtitan_rl.serve.openai.sessions import Answer, Prompt, Session
from torchtitan_rl.serve.openai.tool_calls import ToolReader
from torchtitan_rl.serve.responses.items import item_page
from torchtitan_rl.serve.responses.response_errors import responses_answer
from torchtitan_rl.serve.stored_responses import StoredResponse, StoredResponses

__all__ = ["Gateway", "Served"]

logger = logging.getLogger(__name__)

_MESSAGES = "/v1/messages/"
"""In the paths of Anthropic's dialect, with a session before it or without."""

Handler = Callable[[Request], Awaitable[Response]]
Reader = Callable[[bytes, Collection[str]], tuple[Any, list[str]]]
"""From a body and the ignored parameters to a request, and the parameters that were left out."""


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
        self.context_tokens, self.vocab_size = context_tokens, vocab_size
        self.api_key, self.served, self.limits = api_key, served, limits or ServerLimits()
        self.spans, self.renderings, self.sessions = MessageSpans(), Renderings(), dict[str, Session]()
        self._rate, self._places = Rate(self.limits.requests_per_s), self.limits.places()
        self._stored = dict[str, StoredResponses]()
        """By the session's identity; empty: of the clients without a session."""
        self._readers: dict[tuple[str, int], ToolReader] = {}
        needs_key = bool(api_key) or served is None  # without a served model each session has a key
        self.app = Guard(
            _application(self), hosts=allowed_hosts(host, needs_key, allow_hosts), answer=_answer_of_dialect
        )
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
        for session in list(self.sessions.values()):
            self.end_session(session)
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
        self._stored.pop(session.id, None)

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
            limits=SessionLimits(max_turns=0),  # of its one request, which `_check_size` bounds
            places=self._places,
            model=model or served.name,
            tool_reader=self.tool_reader(served.tool_parser, policy.tokenizer),
            ignored=served.ignored,
        )

    def models(self, key: str) -> list[str]:
        return self._served(key).names()

    def policy_served(self, key: str) -> Policy:
        """The policy of clients without a session. Raises Refused."""
        return self._served(key).policy

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


def _application(gateway: Gateway) -> FastAPI:
    """The application. Every path below `/v1` is there once more below `/sessions/ID`; a header `X-Session-ID` names a
    session too."""
    app = FastAPI(openapi_url=None)
    routes = _Routes(gateway)
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

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._has_dialects = False

    def guarded(self, handler: Handler, refuse: Callable[[Refused], Response]) -> Handler:
        """The handler with refusals as answers, in the form of `refuse`, and spans."""
        spans = self.gateway.spans

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
        names = self.gateway.models(key) if session is None else [session.model]
        more = {"max_model_len": self.gateway.context_tokens}
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
        counts = {"status": "ok", "num_sessions": len(self.gateway.sessions), "requests": self.gateway.spans.as_dict()}
        return _sent(counts | {"num_malformed_calls": self.gateway.num_malformed_calls})

    def _session(self, request: Request) -> Session | None:
        """The session that the path or a header names; None: neither does."""
        session_id = request.path_params.get("session_id") or request.headers.get("x-session-id")
        return None if session_id is None else self.gateway.session(session_id, _key(request))

    def _stored(self, request: Request) -> StoredResponses:
        """The stored responses that the client may see. Raises Refused for a wrong key."""
        session = self._session(request)
        if session is None:
            self.gateway.models(_key(request))
        return self.gateway.stored(session)

    def _tokenizer(self, request: Request) -> Any:
        """The tokenizer of the policy that the client asks. Raises Refused for a wrong key."""
        session = self._session(request)
        return (self.gateway.policy_served(_key(request)) if session is None else session.policy).tokenizer

    async def _load_dialects(self) -> None:
        """vLLM's protocol classes: importing vLLM takes seconds, in which other requests are answered."""
        if not self._has_dialects:
            with self.gateway.spans.away():
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
            self.gateway.models(key)  # refuses a wrong key before a body is read
        try:
            ignored = self.gateway.ignored if session is None else session.ignored
            query, left_out = read(await self._body(request), ignored)
            if session is None:
                session = self.gateway.stateless(key, query.model)
            elif query.model not in (None, session.model):
                raise _not_of_session(query.model, session.model)
            _check_size(query.chat if isinstance(query, Translated) else query, self.gateway.limits)
            if left_out:
                session.counts["ignored"] += len(left_out)
            return session, query
        except Refused:
            if session is not None:
                session.counts["refused"] += 1
            raise

    async def _body(self, request: Request) -> bytes:
        limits, encoding = self.gateway.limits, request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise Refused(
                415,
                f"Content-Encoding={encoding[:40]!r}: bodies are not expanded here; send the body as it is",
                code="unsupported_encoding",
            )
        with self.gateway.spans.away():
            return await read_body(request, limits.body_bytes(self.gateway.context_tokens), limits.body_timeout_s)

    async def _completed(
        self, request: Request, session: Session, query: Any, prompts: Callable[[], list[Prompt]]
    ) -> list[Answer]:
        """Completions, which become turns of the session unless the client has gone."""
        try:
            answers = await session.complete(prompts(), query)
        except Refused:
            session.counts["refused"] += 1
            raise
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
    return _answer_of_dialect(refused, request.url.path)


def _answer_of_dialect(refused: Refused, path: str) -> Response:
    """A refusal that no route has made, in the form of the path's dialect."""
    return anthropic_answer(refused) if _MESSAGES in f"{path}/" else answer(refused)

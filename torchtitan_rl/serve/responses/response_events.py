"""What a client of Responses is sent: a response, whole or as the events of a stream, by the SDK's classes and vLLM's
makers of events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputText,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_output_text import Logprob
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from vllm.entrypoints.openai.responses.streaming_events import (
    SimpleStreamingState,
    emit_simple_content_delta,
    emit_simple_content_done,
    emit_simple_content_open,
    emit_simple_tool_call_delta,
    emit_simple_tool_call_done,
    emit_simple_tool_call_open,
)

from torchtitan_rl.serve.dialect import Translated
from torchtitan_rl.serve.openai.responses import token_logprobs
from torchtitan_rl.serve.openai.sessions import Answer, Session

__all__ = ["event_bytes", "item_events", "response", "response_events", "whole_response"]


def item_events(answer: Answer, query: Translated, tokenizer: Any) -> list[Any]:
    """The events of an answer's items, one after the other: its text as a message unless it has calls alone, and its
    calls. Each item is done in its last event."""
    state, events = SimpleStreamingState(), []
    if answer.content or not answer.calls:
        text = answer.content or ""
        logprobs = [Logprob.model_validate(each) for each in token_logprobs(answer, tokenizer)]
        events += emit_simple_content_open(state)
        events += emit_simple_content_delta(state, text, logprobs if query.chat.logprobs else None)
        events += emit_simple_content_done(state)
        message = events[-1].item
        if not text:  # SDKs' users read content[0]
            message.content = [ResponseOutputText(type="output_text", text="", annotations=[])]
        if answer.finish_reason == "length":
            message.status = "incomplete"
    for i, call in enumerate(answer.calls):
        events += emit_simple_tool_call_open(state, call.name, i, call_id=call.id)
        events += emit_simple_tool_call_delta(state, call.arguments)
        events += emit_simple_tool_call_done(state)
    return events


def response(answer: Answer, query: Translated, session: Session, events: Iterable[Any]) -> Response:
    """The response whose items `events` bring."""
    request, chat, policy = query.request, query.chat, session.policy
    is_cut = answer.finish_reason == "length"
    free = session.seed is None  # the client decides about the temperature
    return Response(
        id=f"resp_{answer.id}",
        object="response",
        created_at=int(time.time()),
        status="incomplete" if is_cut else "completed",
        incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
        model=chat.model or session.model,
        output=[event.item for event in events if isinstance(event, ResponseOutputItemDoneEvent)],
        usage=_usage(len(answer.prompt.tokens), len(answer.completion.tokens)),
        instructions=request.instructions,
        previous_response_id=request.previous_response_id,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        tools=request.tools,
        tool_choice=request.tool_choice,
        parallel_tool_calls=chat.parallel_tool_calls is not False,
        temperature=chat.temperature if free and chat.temperature is not None else policy.temperature,
        top_p=policy.altered.get("top_p", 1.0) if chat.top_p is None else chat.top_p,
        text=request.text,
        reasoning=request.reasoning,
        truncation="disabled",
        background=False,
        top_logprobs=0,
        store=request.store is not False,  # type: ignore[call-arg]  # OpenAI sends it, and the SDK's class lacks it
    )


def whole_response(response_body: Response) -> dict[str, Any]:
    """The response as JSON."""
    return response_body.model_dump(mode="json", by_alias=True)


def response_events(response_body: Response, events: Iterable[Any]) -> Iterator[Any]:
    """The same response as events, in the order in which SDKs put it together again."""
    unknown = {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    begun = response_body.model_copy(update=unknown)
    yield ResponseCreatedEvent(type="response.created", sequence_number=0, response=begun)
    yield ResponseInProgressEvent(type="response.in_progress", sequence_number=0, response=begun)
    yield from events
    if response_body.status == "incomplete":
        yield ResponseIncompleteEvent(type="response.incomplete", sequence_number=0, response=response_body)
    else:
        yield ResponseCompletedEvent(type="response.completed", sequence_number=0, response=response_body)


def event_bytes(events: Iterable[Any]) -> bytes:
    """Events, counted from 0, as server-sent events."""
    return b"".join(
        b"event: %b\ndata: %b\n\n"
        % (
            event.type.encode(),
            json.dumps(event.model_dump(mode="json", by_alias=True) | {"sequence_number": i}).encode(),
        )
        for i, event in enumerate(events)
    )


def _usage(num_prompt_tokens: int, num_sampled_tokens: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=num_prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
        output_tokens=num_sampled_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=num_prompt_tokens + num_sampled_tokens,
    )

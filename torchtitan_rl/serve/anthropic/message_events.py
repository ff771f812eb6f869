"""What a client of Messages is sent: a message, whole or as the events of a stream, by vLLM's classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vllm.entrypoints.anthropic.protocol import (
    AnthropicContentBlock,
    AnthropicDelta,
    AnthropicMessagesResponse,
    AnthropicStreamEvent,
    AnthropicUsage,
)

from torchtitan_rl.serve.openai.sessions import Answer

__all__ = ["event_bytes", "message", "message_events", "whole_message"]

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def message(answer: Answer, model: str, stop_sequence: str | None) -> AnthropicMessagesResponse:
    """The message of an answer; `stop_sequence` is the text of the request that ended it."""
    blocks = []
    if answer.content:
        blocks.append(AnthropicContentBlock(type="text", text=answer.content))
    for call in answer.calls:
        blocks.append(AnthropicContentBlock(type="tool_use", id=call.id, name=call.name, input=_input(call.arguments)))
    reason: Any = _REASONS[answer.finish_reason]
    if reason == "end_turn" and stop_sequence is not None:
        reason = "stop_sequence"
    return AnthropicMessagesResponse(
        id=f"msg_{answer.id}",
        content=blocks or [AnthropicContentBlock(type="text", text="")],  # SDKs' users read content[0]
        model=model,
        stop_reason=reason,
        stop_sequence=stop_sequence if reason == "stop_sequence" else None,
        usage=_usage(answer, len(answer.completion.tokens)),
    )


def whole_message(reply: AnthropicMessagesResponse) -> dict[str, Any]:
    """The message as JSON."""
    return reply.model_dump(mode="json", exclude_none=True) | {"stop_sequence": reply.stop_sequence}


def message_events(reply: AnthropicMessagesResponse) -> Iterator[AnthropicStreamEvent]:
    """The same message as events, in the order in which SDKs put it together again."""
    assert reply.usage is not None
    begun = AnthropicMessagesResponse(
        id=reply.id,
        type="message",
        role="assistant",
        content=[],
        model=reply.model,
        stop_reason=None,
        stop_sequence=None,
        usage=reply.usage.model_copy(update={"output_tokens": 0}),
    )
    yield AnthropicStreamEvent(type="message_start", message=begun)
    for index, block in enumerate(reply.content):
        empty, deltas = _parts(block)
        yield AnthropicStreamEvent(type="content_block_start", index=index, content_block=empty)
        for delta in deltas:
            yield AnthropicStreamEvent(type="content_block_delta", index=index, delta=delta)
        yield AnthropicStreamEvent(type="content_block_stop", index=index)
    end = AnthropicDelta(stop_reason=reply.stop_reason, stop_sequence=reply.stop_sequence)
    yield AnthropicStreamEvent(type="message_delta", delta=end, usage=reply.usage)
    yield AnthropicStreamEvent(type="message_stop")


def event_bytes(events: Iterator[AnthropicStreamEvent]) -> bytes:
    """Events as server-sent events. Fields that were not set are left out, those that were set to null are not."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event.type.encode(), json.dumps(event.model_dump(exclude_unset=True)).encode())
        for event in events
    )


def _parts(block: AnthropicContentBlock) -> tuple[AnthropicContentBlock, list[AnthropicDelta]]:
    """A block that is begun, and what is added to it."""
    if block.type == "tool_use":
        empty = AnthropicContentBlock(type="tool_use", id=block.id, name=block.name, input={})
        return empty, [AnthropicDelta(type="input_json_delta", partial_json=json.dumps(block.input))]
    return AnthropicContentBlock(type="text", text=""), [AnthropicDelta(type="text_delta", text=block.text)]


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as the object that the protocol wants. Arguments that are none come back under one name, and a client
    that sends them back sends another message than the policy said."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _usage(answer: Answer, num_sampled_tokens: int) -> AnthropicUsage:
    return AnthropicUsage(
        input_tokens=len(answer.prompt.tokens),
        output_tokens=num_sampled_tokens,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=0,
    )

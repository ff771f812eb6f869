"""Anthropic's Messages as chat completions: vLLM's protocol classes and its translation, and what neither refuses.

Importing this module imports vLLM, which takes seconds: `serve.routes` does so at the first request.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from vllm.entrypoints.anthropic.protocol import (
    AnthropicContentBlock,
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from torchtitan_rl.rollout.chat import takes_system_messages_within
from torchtitan_rl.rollout.ignored_parameters import MESSAGES_NOT_OFFERED
from torchtitan_rl.serve.dialect import Fields, Translated, body_of, translated, validated
from torchtitan_rl.serve.errors import invalid

__all__ = ["OLDEST", "check_version", "count_request", "messages_request"]

OLDEST = "2023-06-01"
"""The first version of the protocol, in the header `anthropic-version`, that has the messages of today. SDKs send later
dates."""
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")

_OF_BOTH = frozenset(("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"))
_SAMPLED = frozenset(("max_tokens", "stop_sequences", "stream", "temperature", "top_k", "top_p"))
_MEANINGLESS = frozenset(("metadata", "service_tier", "cache_control", "inference_geo"))
_MESSAGES = Fields(offered=_OF_BOTH | _SAMPLED, meaningless=_MEANINGLESS, refused=MESSAGES_NOT_OFFERED)
_COUNT = Fields(offered=_OF_BOTH, meaningless=_MEANINGLESS, refused=MESSAGES_NOT_OFFERED)
_TEXT = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
"""Blocks that are text here: `redacted_thinking` has none and is left out."""
_COUNTED = ("model", "messages", "tools")


def check_version(version: str | None) -> None:
    """Raises Refused (400) for a version of the protocol that is none, or older than `OLDEST`."""
    if version is not None and not (_DATE.fullmatch(version) and version >= OLDEST):
        raise invalid(
            f"anthropic-version={version[:40]!r}: is not spoken here; send {OLDEST} or a later one", "anthropic-version"
        )


def messages_request(tokenizer: Any, body: bytes, ignored: Collection[str] = ()) -> tuple[Translated, list[str]]:
    """A request for a message. System messages among the others go into the first one where the tokenizer's chat
    template refuses them. Raises Refused (400) for a field that is not offered, and for what is not of the form."""
    return _request(AnthropicMessagesRequest, _MESSAGES, tokenizer, body, ignored)


def count_request(tokenizer: Any, body: bytes, ignored: Collection[str] = ()) -> tuple[Translated, list[str]]:
    """A request for the number of tokens of a prompt, as a chat completion with this prompt."""
    return _request(AnthropicCountTokensRequest, _COUNT, tokenizer, body, ignored)


def _request(
    kind: type, fields: Fields, tokenizer: Any, body: bytes, ignored: Collection[str]
) -> tuple[Translated, list[str]]:
    content, left_out = fields.checked(body_of(body), ignored)
    thinking = content.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        why = MESSAGES_NOT_OFFERED["thinking"][1]
        raise invalid(f"thinking: is not offered: {why}; leave it out", "thinking", "unsupported_parameter")
    _check_tools(content.get("tools"))
    request = validated(kind, content)
    _check_messages(request)
    within = any(message.role == "system" for message in request.messages)
    merge = within and not takes_system_messages_within(tokenizer)
    chat = AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=merge)
    chat_fields = chat.model_dump(exclude_unset=True, exclude_none=True, by_alias=True)
    chat_fields.pop("stream_options", None)
    if kind is AnthropicCountTokensRequest:
        chat_fields = {name: chat_fields[name] for name in _COUNTED if name in chat_fields}
    for message in chat_fields["messages"]:
        if "reasoning" in message:
            message["reasoning_content"] = message.pop("reasoning")
    query = translated(request, chat_fields, ignored, left_out)
    return query, query.left_out


def _check_tools(tools: Any) -> None:
    """Raises Refused for a tool that Anthropic runs or describes itself: the policy knows none of them."""
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            continue
        if (type_ := tool.get("type")) not in (None, "custom"):
            raise invalid(
                f"tools.{i}.type={str(type_)[:40]!r}: a tool that Anthropic describes is not offered; give a tool with "
                "input_schema",
                f"tools.{i}.type",
                "unsupported_parameter",
            )
        if tool.get("defer_loading"):
            raise invalid(
                f"tools.{i}.defer_loading: is not offered: the policy reads every tool; leave it out",
                f"tools.{i}.defer_loading",
                "unsupported_parameter",
            )


def _check_messages(request: AnthropicMessagesRequest | AnthropicCountTokensRequest) -> None:
    """Raises Refused for messages that a translation would answer with something else than was asked for."""
    if not request.messages:
        raise invalid("messages: is empty; send at least one", "messages")
    if request.messages[-1].role == "assistant" and isinstance(request, AnthropicMessagesRequest):
        raise invalid(
            "messages: the last is the assistant's, and a completion begins a new message; end with the user's",
            "messages",
            "unsupported_parameter",
        )
    system = request.system if isinstance(request.system, list) else []
    for place, blocks in [("system", system)] + [
        (f"messages.{i}.content", message.content)
        for i, message in enumerate(request.messages)
        if not isinstance(message.content, str)
    ]:
        for i, block in enumerate(blocks):
            for type_ in (block.type, *_types_of_result(block)):
                if type_ not in _TEXT:
                    raise invalid(
                        f"{place}.{i}: a block of type {str(type_)[:40]!r} is no text, and the policy reads text only",
                        f"{place}.{i}",
                        "unsupported_parameter",
                    )
            _check_result(block, f"{place}.{i}")


def _check_result(block: AnthropicContentBlock, place: str) -> None:
    """Raises Refused for a text part of a tool's result without a text, which vLLM's form does not check."""
    for i, part in enumerate(block.content if isinstance(block.content, list) else ()):
        if part.get("type") == "text" and not isinstance(part.get("text"), str):
            where = f"{place}.content.{i}.text"
            raise invalid(f"{where}={str(part.get('text'))[:40]!r}: is no text; send one", where)


def _types_of_result(block: AnthropicContentBlock) -> list[Any]:
    return [each.get("type") for each in block.content] if isinstance(block.content, list) else []

"""OpenAI's Responses as chat completions: vLLM's protocol class and its translation, and what neither refuses.

Importing this module imports vLLM, which takes seconds: `serve.routes` does so at the first request.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from openai.types.responses import FunctionTool, ResponseFunctionToolCall, ResponseReasoningItem
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_chat_messages_with_tool_call

from torchtitan_rl.rollout.ignored_parameters import RESPONSES_NOT_OFFERED
from torchtitan_rl.serve.dialect import Conversation, Fields, Translated, body_of, validated
from torchtitan_rl.serve.errors import Refused, invalid
from torchtitan_rl.serve.openai.requests import chat_request
from torchtitan_rl.serve.responses.items import identified, without_nulls
from torchtitan_rl.serve.stored_responses import StoredResponse, StoredResponses

__all__ = ["LOGPROBS", "count_request", "responses_request"]

LOGPROBS = "message.output_text.logprobs"
"""What `include` may ask for: the log-probability of each sampled token."""

_SAME = frozenset(
    ("model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    + ("seed", "stop", "stop_token_ids", "ignore_eos", "top_logprobs", "parallel_tool_calls", "stream")
)
"""Fields that chat completions have under the same name."""
_FIELDS = Fields(
    offered=_SAME
    | {"input", "instructions", "previous_response_id", "store", "metadata"}
    | {"max_output_tokens", "tools", "tool_choice", "text", "reasoning", "include"},
    meaningless=frozenset(
        ("user", "service_tier", "safety_identifier", "stream_options", "max_tool_calls")
        + ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options")
        + ("client_metadata",)  # Codex's own: what it counts its requests by
    ),
    refused=RESPONSES_NOT_OFFERED,
)
_OF_COUNT = Fields(
    offered=frozenset(("model", "input", "instructions", "previous_response_id", "tools"))
    | {"tool_choice", "parallel_tool_calls", "text", "reasoning"},
    meaningless=frozenset(),
    refused=RESPONSES_NOT_OFFERED,
)
_COUNTED = ("model", "messages", "tools")
"""Parameters of chat completions that a prompt is made from."""
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Reasoning is never written, so there is none to encrypt; agents that keep no state ask for it always."""
_TOOL_FIELDS = ("type", "name", "description", "parameters", "strict")
_NEUTRAL_OF_TOOL = {"defer_loading": False, "allowed_callers": ["direct"]}
_NEUTRAL_OF_REASONING = {"context": "auto", "mode": "standard", "summary": "auto"}
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text")
_UNFINISHED = ("in_progress", "incomplete")


def responses_request(
    stored: StoredResponses, body: bytes, ignored: Collection[str] = ()
) -> tuple[Translated, list[str]]:
    """A request for a response, which may go on from one of `stored`. Raises Refused (400) for a field that is not
    offered, for what is not of the form, and for a response that is not stored."""
    return _request(_FIELDS, stored, body, ignored)


def count_request(stored: StoredResponses, body: bytes, ignored: Collection[str] = ()) -> tuple[Translated, list[str]]:
    """A request for the number of tokens of a prompt, as a chat completion with this prompt: where it has no input, of
    a stored response's conversation alone. Raises Refused as `responses_request` does."""
    return _request(_OF_COUNT, stored, body, ignored)


def _request(
    fields: Fields, stored: StoredResponses, body: bytes, ignored: Collection[str]
) -> tuple[Translated, list[str]]:
    whole = body_of(body)
    tools = _chat_tools(whole.get("tools") or [])
    content, left_out = fields.checked(whole, ignored)
    if fields is _OF_COUNT and "previous_response_id" in content:
        content.setdefault("input", [])
    chat = {name: content[name] for name in _SAME if name in content}
    chat |= _chat_fields(content)
    earlier = _earlier(content.get("previous_response_id"), stored)
    messages = _messages(content, [] if earlier is None else earlier.messages)
    items = [] if earlier is None else [*earlier.items, *map(without_nulls, earlier.whole["output"])]
    # Items were read above, each by its own class: the union of all of them takes many times as long. Fields of chat
    # completions are read as those.
    request = validated(
        ResponsesRequest, {name: content[name] for name in content if name not in _SAME} | {"input": ""}
    )
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    chat["messages"] = system + messages
    if tools:
        chat["tools"] = tools
    if fields is _OF_COUNT:
        chat = {name: chat[name] for name in _COUNTED if name in chat}
    query, also_left_out = chat_request(chat, ignored)
    left_out += also_left_out
    conversation = Conversation(messages, items + identified(content["input"]))
    return Translated(request, query, left_out, conversation), left_out


def _not_offered(place: str, why: str, mend: str = "leave it out") -> Refused:
    return invalid(f"{place}: is not offered: {why}; {mend}", place.partition("=")[0], "unsupported_parameter")


def _chat_tools(tools: Any) -> list[dict[str, Any]]:
    """Functions as chat completions describe them, with their keys in the client's order: a template may show them all.
    Raises Refused for every other kind of tool: OpenAI runs or describes those, and the policy knows none of them."""
    if not isinstance(tools, list):
        raise invalid("tools: is no list; send a list of functions", "tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise invalid(f"tools.{i}: is no object; describe a function", f"tools.{i}")
        if (type_ := tool.get("type")) != "function":
            raise _not_offered(f"tools.{i}.type={str(type_)[:40]!r}", "no tool is run here", "describe a function")
    chat_tools = []
    for i, tool in enumerate(tools):
        for name, value in tool.items():
            if name not in _TOOL_FIELDS and value not in (None, _NEUTRAL_OF_TOOL.get(name)):
                raise _not_offered(f"tools.{i}.{name[:80]}", "the policy reads every function and answers by itself")
        validated(FunctionTool, tool, f"tools.{i}")
        function = {name: tool[name] for name in tool if name in _TOOL_FIELDS[1:] and tool[name] is not None}
        chat_tools.append({"type": "function", "function": function})
    return chat_tools


def _chat_fields(content: dict[str, Any]) -> dict[str, Any]:
    """What fields of other names and forms ask for, as parameters of chat completions."""
    chat: dict[str, Any] = {}
    if "max_output_tokens" in content:
        chat["max_tokens"] = content["max_output_tokens"]
    if "tool_choice" in content:
        chat["tool_choice"] = _chat_choice(content["tool_choice"])
    for i, name in enumerate(_list_of(content, "include")):
        if name not in _INCLUDED:
            raise _not_offered(f"include.{i}={str(name)[:60]!r}", "there is nothing of this kind in a response here")
        chat["logprobs"] = chat.get("logprobs", False) or name == LOGPROBS
    for name, value in _object_of(content, "text").items():
        if name not in ("format", "verbosity"):
            raise _not_offered(f"text.{name[:80]}", "there is no such parameter here")
        if name == "format":
            chat["response_format"] = _chat_format(value)
        else:
            chat["verbosity"] = value
    for name, value in _object_of(content, "reasoning").items():
        if name == "effort":
            chat["reasoning_effort"] = value
        elif value != _NEUTRAL_OF_REASONING.get(name):
            raise _not_offered(f"reasoning.{name[:80]}", "reasoning stays in the text, as the policy wrote it")
    return chat


def _list_of(content: dict[str, Any], name: str) -> list[Any]:
    value = content.get(name, [])
    if not isinstance(value, list):
        raise invalid(f"{name}: is no list; send one", name)
    return value


def _object_of(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The keys of a field that are set."""
    value = content.get(name, {})
    if not isinstance(value, dict):
        raise invalid(f"{name}: is no object; send one", name)
    return {key: each for key, each in value.items() if each is not None}


def _chat_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if (type_ := choice.get("type")) != "function":
        place = f"tool_choice.type={str(type_)[:40]!r}"
        raise _not_offered(place, "no tool is run here", "name a function, or ask for auto, none or required")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _chat_format(value: Any) -> Any:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {name: value[name] for name in value if name != "type"}}


# The conversation.


def _earlier(previous: Any, stored: StoredResponses) -> StoredResponse | None:
    """The response that a request goes on from; None: it begins a conversation. Raises Refused for one that is not
    stored."""
    if previous is None:
        return None
    earlier = stored.get(previous) if isinstance(previous, str) else None
    if earlier is None:
        raise invalid(
            f"previous_response_id={str(previous)[:80]!r}: no such response is stored (store was false, it was "
            f"deleted, or it made way: the last {stored.max_responses} are kept, of {stored.max_bytes} bytes in "
            "all); send its items back in input",
            "previous_response_id",
            "previous_response_not_found",
        )
    return earlier


def _messages(content: dict[str, Any], history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation of a request as messages of chat completions, without `instructions`; `history` goes before."""
    items = content.get("input")
    if isinstance(items, str):
        return [*history, {"role": "user", "content": items}]
    if not isinstance(items, list):
        raise invalid("input: is neither text nor a list of items; send one of them", "input")
    read = [_item(item, f"input.{i}") for i, item in enumerate(items)]
    _check_last(items)
    try:
        messages = construct_chat_messages_with_tool_call([item for item in read if item is not None])
    except Exception as error:  # vLLM's own, always about the items
        raise invalid(f"input: {' '.join(str(error).split())[:300]}; mend the items", "input") from error
    for message in messages:
        if "reasoning" in message:
            message["reasoning_content"] = message.pop("reasoning")
    return [*history, *messages]


def _check_last(items: list[Any]) -> None:
    """Raises Refused for a conversation that ends in the middle of a message: vLLM would go on within it."""
    last = items[-1] if items else {}
    if last.get("status") in _UNFINISHED and last.get("type", "message") in ("message", "reasoning"):
        raise _not_offered(
            f"input.{len(items) - 1}.status={last['status']!r}",
            "a completion begins a new message",
            "end with the user's",
        )


def _item(item: Any, place: str) -> Any:
    """An item as vLLM's translation takes it, with texts in the place of lists of parts; None: it says nothing. Raises
    Refused for an item that is not of its form, or whose kind the policy cannot read."""
    if not isinstance(item, dict):
        raise invalid(f"{place}: is no object; send an item", place)
    type_ = item.get("type", "message")
    if type_ == "message":
        if (role := item.get("role")) not in _ROLES:
            raise invalid(f"{place}.role={str(role)[:40]!r}: is none of {', '.join(_ROLES)}", f"{place}.role")
        return {"role": role, "content": _text(item.get("content"), f"{place}.content")}
    if type_ == "function_call":
        call = validated(ResponseFunctionToolCall, item, place)
        if call.namespace is not None:
            raise _not_offered(f"{place}.namespace", "functions have no namespaces here")
        return call
    if type_ == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            raise invalid(f"{place}.call_id: is no text; send the call's", f"{place}.call_id")
        return item | {"output": _text(item.get("output"), f"{place}.output")}
    if type_ == "reasoning":
        return _reasoning(item, place)
    raise _not_offered(f"{place}.type={str(type_)[:40]!r}", "the policy reads messages, calls of functions and their "
                       "results, and reasoning", "send those alone")  # fmt: skip


def _reasoning(item: dict[str, Any], place: str) -> ResponseReasoningItem | None:
    """A reasoning item with one text; None: it has no text."""
    if item.get("encrypted_content"):
        raise _not_offered(f"{place}.encrypted_content", "nobody here can read it")
    read = validated(ResponseReasoningItem, {"id": "", "summary": []} | item, place)
    text = "".join(part.text for part in read.content or read.summary)
    if not text:
        return None
    parts = [{"type": "reasoning_text", "text": text}]
    return ResponseReasoningItem.model_validate({"id": read.id, "type": "reasoning", "summary": [], "content": parts})


def _text(value: Any, place: str) -> str:
    """The text of a message or of a call's result."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(f"{place}: is neither text nor a list of parts; send one of them", place)
    texts = []
    for i, part in enumerate(value):
        type_ = part.get("type") if isinstance(part, dict) else type(part).__name__
        if type_ not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise invalid(
                f"{place}.{i}: a part of type {str(type_)[:40]!r} is no text, and the policy reads text only",
                f"{place}.{i}",
                "unsupported_parameter",
            )
        texts.append(part["text"])
    return "".join(texts)

"""Messages of clients: as the chat template takes them, and what of them must be equal for them to be the same."""

from __future__ import annotations

from typing import Any

from torchtitan_rl.serve.openai.requests import ChatMessage
from torchtitan_rl.serve.openai.tool_calls import Call, same_arguments

__all__ = ["compared", "compared_answer", "rendered_message"]


def rendered_message(message: ChatMessage) -> dict[str, Any]:
    """A message for the chat template: text, and arguments of calls as objects."""
    role = "system" if message.role == "developer" else message.role
    rendered: dict[str, Any] = {"role": role, "content": message.content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    if message.tool_calls:
        rendered["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.arguments()}}
            for call in message.tool_calls
        ]
    return rendered


def compared(message: ChatMessage) -> tuple:
    """What of a message must be equal for a conversation to be the same: of the assistant's, its text without trailing
    white space, and its calls with their arguments as JSON; of any other, role and text."""
    if message.role != "assistant":
        return (message.role, message.content or "")
    calls = tuple((call.function.name, same_arguments(call.function.arguments)) for call in message.tool_calls or ())
    return ("assistant", (message.content or "").rstrip(), calls)


def compared_answer(content: str | None, calls: list[Call]) -> tuple:
    """`compared` of the message that the client was sent."""
    same = tuple((call.name, same_arguments(call.arguments)) for call in calls)
    return ("assistant", (content or "").rstrip(), same)

"""Calls of tools in what the policy said, found by vLLM's own parsers."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.types import Completion

__all__ = ["Call", "ToolReader", "same_arguments"]

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Call:
    """One call of a tool. Example: `Call("call_0_0", "add", '{"a": 1}')`."""

    id: str
    name: str
    arguments: str
    """JSON, as the parser read it."""


class ToolReader:
    """One of vLLM's tool parsers, by its name, such as `hermes` or `pythonic`.

    Raises ValueError for a name that vLLM does not know, and for a tokenizer that the parser refuses. The first reader
    of a process imports vLLM, which takes seconds.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        from torchtitan_rl import adapters

        adapters.prepare_vllm(eager=True)
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager

        self.name, self.tokenizer = name, tokenizer
        self._request, self._tool = ChatCompletionRequest, ChatCompletionToolsParam
        try:
            self._parser = ToolParserManager.get_tool_parser(name)
        except KeyError:
            known = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
            raise ValueError(
                f"tool_parser={name!r}: vLLM has none of this name; use one of {', '.join(known)}"
            ) from None
        try:
            self._parser(tokenizer)
        except Exception as error:  # parsers raise anything for a tokenizer without their tokens
            raise ValueError(f"tool_parser={name!r}: refuses the tokenizer ({error}); use the model's own") from error

    def read(self, completion: Completion, text: str, tools: list[dict], turn: int) -> tuple[str | None, list[Call]]:
        """(what is said besides the calls, the calls) of a completion whose text is `text`. `tools` are those of the
        request, `turn` is the number of the turn in its session."""
        offered = [self._tool.model_construct(type="function", function=_Function(tool["function"])) for tool in tools]
        request = self._request.model_construct(
            messages=[], tools=offered, tool_choice="auto", skip_special_tokens=True
        )
        parser = self._parser(self.tokenizer, offered)
        request = parser.adjust_request(request)
        if not request.skip_special_tokens:
            text = self._with_special(completion, text)
        try:
            found = parser.extract_tool_calls(text, request)
        except Exception as error:  # whatever the policy wrote, it is an answer
            logger.warning("tool_parser=%r: failed on what the policy said (%s); it counts as text", self.name, error)
            return text, []
        if not found.tools_called:
            return text, []
        calls = [
            Call(f"call_{turn}_{i}", call.function.name, call.function.arguments)
            for i, call in enumerate(found.tool_calls)
        ]
        return found.content or None, calls

    def _with_special(self, completion: Completion, text: str) -> str:
        """The text with special tokens, some of which open a call, without the token that ended the turn."""
        tokens = completion.tokens
        special = set(self.tokenizer.all_special_ids)
        if not special.intersection(tokens[:-1]):
            return text
        ended = completion.finish_reason == "stop" and tokens[-1] in special
        return self.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)


class _Function(dict):
    """A function's description, with attributes where parsers look for attributes."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def same_arguments(arguments: str) -> str:
    """Arguments in one form: JSON with sorted keys; text that is not JSON as it is."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments

"""Calls of tools in what the policy said, found by vLLM's own parsers; and the forms in which a policy writes calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.serve.openai import call_forms
from torchtitan_rl.serve.openai.stop_texts import cut
from torchtitan_rl.types import Completion

__all__ = ["Call", "ParsedCompletion", "ToolReader", "calls_of_json", "same_arguments"]


@dataclass(slots=True, frozen=True)
class Call:
    """One call of a tool. Example: `Call("call_5d2c_0", "add", '{"a": 1}')`."""

    id: str
    name: str
    arguments: str
    """JSON, as the parser read it."""


@dataclass(slots=True, frozen=True)
class ParsedCompletion:
    """What a parser makes of one completion."""

    content: str | None
    """What is said besides the calls."""
    calls: list[Call]
    malformed: bool = False
    """Whether the text begins a call and is none: it is content then."""


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

        self.name, self.tokenizer, self.num_malformed = name, tokenizer, 0
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
        modules = {parent.__module__ for parent in self._parser.__mro__} | {"vllm.tool_parsers.utils"}
        self._loggers = [logging.getLogger(module) for module in modules if module.startswith("vllm.")]

    def read(
        self, completion: Completion, text: str, tools: list[dict], answer_id: str, stops: list[str]
    ) -> ParsedCompletion:
        """What a completion whose text is `text` says and calls. `tools` are those of the request, `stops` the texts at
        which `text` was cut; identities of calls begin with `answer_id`."""
        offered = [self._tool.model_construct(type="function", function=_Function(tool["function"])) for tool in tools]
        request = self._request.model_construct(
            messages=[], tools=offered, tool_choice="auto", skip_special_tokens=True
        )
        parser = self._parser(self.tokenizer, offered)
        if hasattr(parser, "skip_reasoning_parsing"):
            parser.skip_reasoning_parsing = True  # reasoning stays in the text, as vLLM has it without a parser for it
        request = parser.adjust_request(request)
        if not request.skip_special_tokens:
            text = cut(self._with_special(completion, text), stops)
        with self._complaints() as complaints:
            try:
                extracted = parser.extract_tool_calls(text, request)
            except Exception:  # whatever the policy wrote, it is an answer
                complaints.number += 1
                extracted = None
        if extracted is None or not extracted.tools_called:
            self.num_malformed += bool(complaints.number)
            return ParsedCompletion(text, [], bool(complaints.number))
        functions = [call.function for call in extracted.tool_calls]
        calls = [Call(call_id(answer_id, i), each.name, each.arguments) for i, each in enumerate(functions)]
        return ParsedCompletion(extracted.content or None, calls)

    def form(self, tools: list[dict], *, required: bool, single: bool) -> dict[str, Any] | None:
        """What the policy may write where it is offered `tools`, as a format of xgrammar's structural tags: a call
        (`required`), or a call or text. `single`: at most one call. None: the parser's form has no grammar here.
        Raises ValueError for a tool that cannot be written in the parser's form."""
        if self.name in call_forms.PYTHONIC:
            return call_forms.pythonic(tools, required=required, single=single)
        if self._parser.structural_tag_model is None:
            return None
        from vllm.tool_parsers.structural_tag_registry import limit_to_single_tool_call
        from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

        try:
            offered = [self._tool.model_validate(tool) for tool in tools]
            request = self._request.model_construct(
                messages=[], tools=offered, tool_choice="required" if required else "auto"
            )
            parser = self._parser(self.tokenizer, offered)
            tag = parser.get_structural_tag(request, strict_level=ToolStrictLevel.PARAMETER)
        except Exception as error:  # vLLM's and xgrammar's, of many types, always about the tools
            raise ValueError(f"tools: {' '.join(str(error).split())[:500]}; mend them") from error
        if tag is None:
            return None
        tag = limit_to_single_tool_call(tag) if single else tag
        return tag.format.model_dump(mode="json")

    def check_template(self) -> str:
        """Renders a conversation with a call by the tokenizer's chat template. Returns the call's text where the parser
        reads another call out of it, or none; empty: the same call. Raises ValueError for a template without the
        call."""
        if not getattr(self.tokenizer, "chat_template", None):
            return ""
        name, arguments = "look_up", {"city": "Oslo", "number": 3}
        function = {"name": name, "arguments": arguments}
        call = {"id": "aB3dE6gH9", "type": "function", "function": function}  # Mistral's templates take such ids only
        properties = {"city": {"type": "string"}, "number": {"type": "integer"}}
        described = {"description": "looks up", "parameters": {"type": "object", "properties": properties}}
        tools = [{"type": "function", "function": {"name": name, **described}}]
        question = {"role": "user", "content": "a"}
        result = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": "b"}

        def rendered(**message: Any) -> str:
            messages = [question, {"role": "assistant", **message}, result]
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)

        try:
            called, spoken = rendered(content="", tool_calls=[call]), rendered(content=_MARK)
        except Exception as error:  # a template may raise anything
            raise ValueError(
                f"tool_parser={self.name!r}: the tokenizer's chat template refuses a conversation with a call of a "
                f"tool ({' '.join(str(error).split())[:300]}); give it a template that renders tool_calls"
            ) from error
        before, _, after = spoken.partition(_MARK)
        text = called[len(before) : len(called) - len(after)] if called.startswith(before) else called
        if name not in text:
            raise ValueError(
                f"tool_parser={self.name!r}: the tokenizer's chat template leaves tool_calls out, so the policy would "
                "not see the calls that clients send back; write them into chat_template of tokenizer_config.json in "
                "the form that the parser reads"
            )
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        completion = Completion(tokens=tokens, logprobs=[], policy_versions=[], finish_reason="length")
        plain = self.tokenizer.decode(tokens, skip_special_tokens=True)
        read = [(each.name, json.loads(each.arguments)) for each in self.read(completion, plain, tools, "", []).calls]
        return "" if read == [(name, arguments)] else text

    @contextmanager
    def _complaints(self) -> Iterator[_Complaints]:
        """Counts what parsers log, and keeps it from the log: a policy that writes no call is no fault of the
        server."""
        complaints = _Complaints()
        for logger in self._loggers:
            logger.addFilter(complaints)
        try:
            yield complaints
        finally:
            for logger in self._loggers:
                logger.removeFilter(complaints)

    def _with_special(self, completion: Completion, text: str) -> str:
        """The text with special tokens, some of which open a call, without the token that ended the turn."""
        tokens = completion.tokens
        special = set(self.tokenizer.all_special_ids)
        if not special.intersection(tokens[:-1]):
            return text
        ended = completion.finish_reason == "stop" and tokens[-1] in special
        return self.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=False)


_MARK = "what-is-said"


class _Complaints(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def filter(self, record: logging.LogRecord) -> bool:
        self.number += record.levelno >= logging.WARNING
        return record.levelno < logging.WARNING


class _Function(dict):
    """A function's description, with attributes where parsers look for attributes."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


def call_id(answer_id: str, index: int) -> str:
    """The identity of a call: no other completion has a call of the same."""
    return f"call_{answer_id}_{index}"


def calls_of_json(text: str, answer_id: str) -> ParsedCompletion:
    """The calls of a completion that was held to `call_forms.json_list`."""
    try:
        written = json.loads(text)
        calls = [
            Call(call_id(answer_id, i), each["name"], json.dumps(each["parameters"], ensure_ascii=False))
            for i, each in enumerate(written)
        ]
    except (ValueError, TypeError, KeyError, RecursionError):  # cut off by a limit
        return ParsedCompletion(text, [], True)
    return ParsedCompletion(None, calls)


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def same_arguments(arguments: str) -> str:
    """Arguments in one form: JSON with sorted keys, and 1.0 as 1, which is what JavaScript writes; text that is not
    JSON as it is."""
    try:
        return json.dumps(json.loads(arguments, parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments

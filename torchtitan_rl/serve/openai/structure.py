"""From a request's tools and format to what the answer's text must be."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.rollout.ignored_parameters import CONSTRAINTS
from torchtitan_rl.serve.errors import invalid
from torchtitan_rl.serve.openai import call_forms
from torchtitan_rl.serve.openai.requests import ChatRequest, NamedTool
from torchtitan_rl.serve.openai.tool_calls import ToolReader

__all__ = ["Structure", "structure", "refuse_for_training"]


@dataclass(slots=True, frozen=True)
class Structure:
    """What an answer must be, and how its calls are read."""

    tag: str = ""
    """`SamplingParams.structure`."""
    reads_calls: bool = True
    """Whether the answer is read for calls: not with `tool_choice: none`."""
    calls_as_json: bool = False
    """Whether calls are written as `call_forms.json_list`, and not in the tool parser's form."""


def structure(request: ChatRequest, tools: list[dict], reader: ToolReader | None) -> Structure:
    """The structure that a request asks for; without a tag where it asks for none. Raises Refused for a tool that is
    not there, and for what no grammar says."""
    try:
        return _structure(request, tools, reader)
    except ValueError as error:
        raise invalid(str(error), "tools") from error


def refuse_for_training(request: ChatRequest, tools: list[dict]) -> None:
    """Raises Refused for a request that constrains what a policy in training says."""
    for name, neutral in CONSTRAINTS.items():
        value = getattr(request, name)
        value = value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
        if value is None or value in neutral or (name == "parallel_tool_calls" and not tools):
            continue
        raise invalid(
            f"{name}: this session trains, and a policy that is held to something draws from another distribution than "
            f"its own; leave {name} out, or name it in external(ignored=...)",
            name,
            "unsupported_parameter",
        )


def _structure(request: ChatRequest, tools: list[dict], reader: ToolReader | None) -> Structure:
    schema = None if request.response_format is None else request.response_format.schema_asked
    answer = None if schema is None else call_forms.json_value(schema)
    choice, single = request.tool_choice, request.parallel_tool_calls is False
    if choice == "required" or isinstance(choice, NamedTool):
        return _forced(choice, tools, reader, single)
    if choice == "none" or not tools or reader is None:
        return Structure(_tag(answer), reads_calls=choice != "none")
    if answer is None and not single:
        return Structure()
    form = reader.form(tools, required=answer is not None, single=single)
    if form is None:
        param = "response_format" if single is False else "parallel_tool_calls"
        raise invalid(
            f"{param}: beside tools it needs a grammar of calls, and tool_parser={reader.name!r} has none; leave "
            f"{param} or tools out",
            param,
            "unsupported_parameter",
        )
    return Structure(_tag(form if answer is None else call_forms.any_of(form, answer)))


def _forced(choice: Any, tools: list[dict], reader: ToolReader | None, single: bool) -> Structure:
    if isinstance(choice, NamedTool):
        tools, single = [tool for tool in tools if tool["function"].get("name") == choice.function.name], True
    if not tools:
        name = choice.function.name if isinstance(choice, NamedTool) else ""
        raise invalid(
            f"tool_choice: asks for a call{f' of {name!r}' if name else ''}, and tools has none; add the tool to tools",
            "tool_choice",
        )
    form = None if reader is None else reader.form(tools, required=True, single=single)
    if form is None:
        return Structure(_tag(call_forms.json_list(tools, single=single)), calls_as_json=True)
    return Structure(_tag(form))


def _tag(form: dict[str, Any] | None) -> str:
    return "" if form is None else json.dumps({"type": "structural_tag", "format": form})

"""How a policy writes calls of tools, as formats of xgrammar's structural tags.

https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html. vLLM has such formats for most parsers; those here are for a
parser that vLLM has none for, and for answers without a parser.
"""

from __future__ import annotations

import keyword
from typing import Any

__all__ = ["PYTHONIC", "any_of", "json_list", "json_value", "pythonic", "text_without"]

PYTHONIC = ("pythonic", "llama4_pythonic")
"""vLLM's parsers that read `[add(a=1, b=2)]`."""

_MAX_WHITESPACE = 8
"""White space in a row, in JSON: a line's end and an indentation. Without a bound an untrained policy writes nothing
else."""
_MAX_OPTIONAL = 12
"""Optional arguments of one tool in Python's form: the format grows with the square of their number."""


def json_value(schema: dict[str, Any] | bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_WHITESPACE}


def text_without(parts: list[str]) -> dict[str, Any]:
    """Any text in which none of the parts occurs."""
    return {"type": "any_text", "excludes": parts}


def any_of(*formats: dict[str, Any]) -> dict[str, Any]:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": list(formats)}


def json_list(tools: list[dict], *, single: bool) -> dict[str, Any]:
    """`[{"name": "add", "parameters": {"a": 1}}]`, as vLLM has it for parsers without a format of their own."""
    calls, definitions = [], {}
    for tool in tools:
        parameters = _parameters(tool)
        definitions |= parameters.pop("$defs", {})
        properties = {"name": {"const": tool["function"]["name"]}, "parameters": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    schema |= {"maxItems": 1} if single else {}
    return json_value(schema | ({"$defs": definitions} if definitions else {}))


def pythonic(tools: list[dict], *, required: bool, single: bool) -> dict[str, Any]:
    """`[add(a=1, b=2)]`, and unless `required` any text without the beginning of a call. Arguments that a tool requires
    come first, values are JSON. Raises ValueError for names that Python does not take."""
    call = any_of(*map(_pythonic_call, tools))
    more = [] if single else [{"type": "star", "content": _sequence(", ", call)}]
    calls = _sequence("[", call, *more, "]")
    openings = [f"[{tool['function']['name']}(" for tool in tools]
    return calls if required else any_of(calls, text_without(openings))


def _pythonic_call(tool: dict) -> dict[str, Any]:
    name, parameters = tool["function"]["name"], _parameters(tool)
    properties, definitions = parameters.get("properties", {}), parameters.get("$defs", {})
    for word in (name, *properties):
        if not word.isidentifier() or keyword.iskeyword(word) or not word[0].isalpha():
            raise ValueError(f"tools: {word!r} is no name that a call in Python's form can have; give it another name")
    needed = [each for each in properties if each in parameters.get("required", ())]
    optional = [each for each in properties if each not in needed]
    if len(optional) > _MAX_OPTIONAL:
        raise ValueError(
            f"tools: {name} has {len(optional)} optional arguments, and {_MAX_OPTIONAL} can be had; require some"
        )

    def argument(each: str) -> dict[str, Any]:
        schema = properties[each]
        return _sequence(f"{each}=", json_value(schema | {"$defs": definitions} if definitions else schema))

    def rest(names: list[str]) -> list[dict]:
        return [{"type": "optional", "content": _sequence(", ", argument(each))} for each in names]

    if needed:
        first, *further = map(argument, needed)
        arguments = [_sequence(first, *(_sequence(", ", each) for each in further), *rest(optional))]
    else:  # any of the optional ones may be the first
        ones = [_sequence(argument(each), *rest(optional[i + 1 :])) for i, each in enumerate(optional)]
        arguments = [{"type": "optional", "content": any_of(*ones)}] if ones else []
    return _sequence(f"{name}(", *arguments, ")")


def _parameters(tool: dict) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, a copy."""
    return dict(tool["function"].get("parameters") or {"type": "object", "properties": {}})


def _sequence(*parts: str | dict) -> dict[str, Any]:
    elements = [{"type": "const_string", "value": part} if isinstance(part, str) else part for part in parts]
    return {"type": "sequence", "elements": elements}

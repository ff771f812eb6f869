"""What a completion's text must be, in vLLM's terms, and JSON schemas of which the grammar would be wider."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

__all__ = ["structured_outputs"]

_PASSED_OVER = ("not", "if", "then", "else", "dependentSchemas", "dependentRequired")
"""Keywords of JSON schemas that xgrammar 0.2 reads without effect, besides those that vLLM lists."""


def structured_outputs(structure: str) -> StructuredOutputsParams | None:
    """vLLM's parameter for `SamplingParams.structure`; None for an empty one. Raises ValueError for a schema with a
    keyword that xgrammar would pass over: answers would not be of the schema."""
    if not structure:
        return None
    for schema in _schemas(json.loads(structure)):
        keyword = _passed_over(schema)
        if keyword or has_xgrammar_unsupported_json_features(schema):
            raise ValueError(
                f"structure: the JSON schema {json.dumps(schema)[:300]} has {keyword or 'a keyword'} that no grammar "
                "here expresses (multipleOf, uniqueItems, contains, not, if, several allOf, some formats and pairs); "
                "leave it out"
            )
    return StructuredOutputsParams(structural_tag=structure)


def _schemas(part: Any) -> Iterator[dict]:
    """The JSON schemas of a structural tag, also of the older form, whose `structures` have a `schema` each."""
    if isinstance(part, list):
        for item in part:
            yield from _schemas(item)
    elif isinstance(part, dict) and isinstance(schema := part.get("json_schema"), dict):
        yield schema
    elif isinstance(part, dict):
        structures = part.get("structures")
        for structure in structures if isinstance(structures, list) else ():
            if isinstance(structure, dict) and isinstance(schema := structure.get("schema"), dict):
                yield schema
        yield from _schemas(list(part.values()))


def _passed_over(schema: Any, *, names: bool = False) -> str:
    """A keyword without effect in a schema. `names`: the keys are names of properties or definitions."""
    if isinstance(schema, list):
        return next(filter(None, map(_passed_over, schema)), "")
    if not isinstance(schema, dict):
        return ""
    for key, value in schema.items():
        if not names and (key in _PASSED_OVER or (key == "allOf" and isinstance(value, list) and len(value) > 1)):
            return key
        if not names and key in ("enum", "const", "default", "examples"):
            continue
        if deeper := _passed_over(value, names=not names and key in ("properties", "patternProperties", "$defs")):
            return deeper
    return ""

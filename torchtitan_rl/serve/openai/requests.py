"""What clients send: bodies of requests, and parameters that are not offered, each with the reason.

The models are this package's own. vLLM's need vLLM in the controller's process, and accept what no completion here
could keep; those of OpenAI's SDK describe arguments and check little.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from torchtitan_rl.rollout.ignored_parameters import IGNORABLE, NOT_OFFERED
from torchtitan_rl.serve.errors import invalid, refusal_of
from torchtitan_rl.tasks.reward_parts import MAX_PARTS
from torchtitan_rl.types import MAX_REWARD

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "RewardRequest",
    "Sampled",
    "ToolCall",
    "ChatMessage",
    "chat_request",
    "parse",
]

_MEANINGLESS = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Parameters that mean nothing here and change no answer."""


def _text(value: Any) -> Any:
    """The text of a message's content: a list of text parts becomes one text."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"a part of type {str(kind)[:40]!r} is no text, and the policy reads text only")
        texts.append(part["text"])
    return "".join(texts)


Text = Annotated[str, BeforeValidator(_text)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False, hide_input_in_errors=True)


class Function(_Body):
    name: str
    arguments: str = "{}"


class ToolCall(_Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: Function

    def arguments(self) -> Any:
        """The arguments as an object where they are JSON, else their text."""
        try:
            return json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            return self.function.arguments


class ChatMessage(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


def _function(value: Any) -> Any:
    """A function's description, with its keys in their order: a template may show them all."""
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError("has no name; give the function one")
    if not isinstance(value.get("parameters", {}), dict | None):
        raise ValueError("parameters are no JSON schema; give an object")
    return value


class Tool(_Body):
    type: Literal["function"] = "function"
    function: Annotated[dict[str, Any], AfterValidator(_function)]


class StreamOptions(_Body):
    include_usage: bool | None = False


class Sampled(_Body):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    n: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    return_policy_versions: bool | None = False

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def limit(self) -> int | None:
        """The completion's limit in tokens, as asked for."""
        return self.max_tokens


class NamedFunction(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class JsonSchema(_Body):
    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is given with type 'json_schema', and only with it")
        return self

    @property
    def schema_asked(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None: any text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class ChatRequest(Sampled):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Sampled):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=0)


_Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class RewardRequest(_Body):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    reward: _Reward
    parts: dict[str, _Reward] = Field(default_factory=dict, max_length=MAX_PARTS)


def parse(kind: type[_Body], body: bytes, ignored: Collection[str] = ()) -> tuple[Any, list[str]]:
    """A body as `kind`, and the parameters of `ignored` that it had; they are left out. Raises Refused (400) for what
    is not of the form, and for parameters that are not offered."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise refusal_of(error) from None
    return request, _checked(request, ignored)


def chat_request(content: dict[str, Any], ignored: Collection[str] = ()) -> tuple[ChatRequest, list[str]]:
    """`parse` of a request that a translation made."""
    try:
        request = ChatRequest.model_validate(content)
    except ValidationError as error:
        raise refusal_of(error) from None
    return request, _checked(request, ignored)


def _checked(request: _Body, ignored: Collection[str]) -> list[str]:
    fields = type(request).model_fields
    # Of two dialects one may need what the other ignores, such as `prompt`.
    left_out = [n for n in ignored if _asks(request, n) and not (n in fields and fields[n].is_required())]
    for name in left_out:
        setattr(request, name, None)
    for name, value in (request.model_extra or {}).items():
        if value is None or name in _MEANINGLESS:
            continue
        neutral, why = NOT_OFFERED.get(name, ((), "there is no such parameter here"))
        if value not in neutral:
            raise invalid(f"{name[:80]}: is not offered: {why}; leave it out", name[:80], "unsupported_parameter")
    return left_out


def _asks(request: _Body, name: str) -> bool:
    """Whether a request has a parameter that asks for something."""
    value = getattr(request, name, None)
    value = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
    return value is not None and value not in IGNORABLE[name]

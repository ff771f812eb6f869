"""What clients send: bodies of requests, and parameters that are not offered, each with the reason.

The models are this package's own. vLLM's need vLLM in the controller's process, and accept what no completion here
could keep; those of OpenAI's SDK describe arguments and check little.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from torchtitan_rl.server.errors import invalid, refusal_of
from torchtitan_rl.tasks.reward_parts import MAX_PARTS
from torchtitan_rl.types import MAX_REWARD

__all__ = ["ChatRequest", "CompletionRequest", "RewardRequest", "Sampled", "ToolCall", "ChatMessage", "parse"]

_IGNORED = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Parameters that mean nothing here and change no answer."""

_NOT_OFFERED: dict[str, tuple[tuple, str]] = {
    "logit_bias": (({},), "it would draw from another distribution than the policy's"),
    "response_format": (({"type": "text"},), "nothing constrains what the policy may say"),
    "functions": (([],), "it was replaced by tools; use tools"),
    "function_call": (("none", "auto"), "it was replaced by tool_choice; use tools"),
    "parallel_tool_calls": ((True,), "nothing constrains how many calls the policy makes"),
    "modalities": ((["text"],), "the policy writes text only"),
    "audio": ((), "the policy writes text only"),
    "prediction": ((), "there is no speculative decoding from a given text"),
    "web_search_options": ((), "there is no search"),
    "reasoning_effort": ((), "the chat template decides; write it into the messages"),
    "verbosity": ((), "the chat template decides; write it into the messages"),
    "best_of": ((1,), "ask for n completions and choose"),
    "echo": ((False,), "the prompt is known to who sent it"),
    "suffix": (("",), "the policy writes from left to right"),
    "top_logprobs": ((0,), "the engine gives the log-probability of each sampled token, and of no other"),
    "prompt_logprobs": ((0,), "the engine gives log-probabilities of sampled tokens"),
    "min_tokens": ((0,), "it would draw from another distribution than the policy's"),
    "bad_words": (([],), "it would draw from another distribution than the policy's"),
    "allowed_token_ids": (([],), "it would draw from another distribution than the policy's"),
    "structured_outputs": ((), "nothing constrains what the policy may say"),
    "use_beam_search": ((False,), "completions are sampled"),
    "length_penalty": ((1.0,), "completions are sampled"),
    "skip_special_tokens": ((True,), "ask for return_token_ids to see special tokens"),
    "spaces_between_special_tokens": ((True,), "ask for return_token_ids to see special tokens"),
    "include_stop_str_in_output": ((False,), "ask for return_token_ids to see what was sampled"),
    "chat_template": ((), "the tokenizer's template renders"),
    "chat_template_kwargs": (({},), "the tokenizer's template renders, with nothing but messages and tools"),
    "add_generation_prompt": ((True,), "a completion begins a new message"),
    "continue_final_message": ((False,), "a completion begins a new message"),
}
"""Parameter -> (values that ask for nothing, why anything else is refused)."""


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


class Tool(_Body):
    type: Literal["function"] = "function"
    function: dict[str, Any]


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


class ChatRequest(Sampled):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    tools: list[Tool] | None = None
    tool_choice: Any = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(Sampled):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None


_Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class RewardRequest(_Body):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)

    reward: _Reward
    parts: dict[str, _Reward] = Field(default_factory=dict, max_length=MAX_PARTS)


def parse(kind: type[_Body], body: bytes) -> Any:
    """A body as `kind`. Raises Refused (400) for what is not of the form, and for parameters that are not offered."""
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        raise refusal_of(error) from None
    for name, value in (asked.model_extra or {}).items():
        if value is None or name in _IGNORED:
            continue
        neutral, why = _NOT_OFFERED.get(name, ((), "there is no such parameter here"))
        if value not in neutral:
            raise invalid(f"{name[:80]}: is not offered: {why}; leave it out", name[:80], "unsupported_parameter")
    return asked

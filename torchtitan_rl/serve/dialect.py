"""What the dialects beside chat completions share: a request of a dialect becomes a `ChatRequest`, and what is refused
of that one is named as the client wrote it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from torchtitan_rl.rollout.ignored_parameters import NOT_OFFERED
from torchtitan_rl.serve.errors import Refused, invalid
from torchtitan_rl.serve.openai.requests import ChatRequest, chat_request

__all__ = ["Conversation", "Fields", "Translated", "body_of", "renamed", "translated", "validated"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Fields:
    """The fields of a dialect's request."""

    offered: frozenset[str]
    meaningless: frozenset[str]
    """Fields that change no answer here."""
    refused: Mapping[str, tuple[tuple, str]]
    """Field -> (values that ask for nothing, why anything else is refused)."""

    def checked(self, body: dict[str, Any], ignored: Collection[str]) -> tuple[dict[str, Any], list[str]]:
        """The offered fields of a body, and which of `ignored` were left out of it. Raises Refused (400) for any other
        field that asks for something."""
        content, left_out = {}, []
        for name, value in body.items():
            if value is None or name in self.meaningless:
                continue
            # Clients of vLLM send parameters of chat completions in the other dialects too.
            terms = self.refused if name in self.refused or name in self.offered else NOT_OFFERED
            neutral, why = terms.get(name, ((), "there is no such parameter here"))
            if name in terms and value in neutral:
                continue
            if name in terms and name in ignored:
                left_out.append(name)
            elif name in self.offered:
                content[name] = value
            else:
                raise invalid(f"{name[:80]}: is not offered: {why}; leave it out", name[:80], "unsupported_parameter")
        return content, left_out


@dataclass(slots=True, frozen=True)
class Conversation:
    """What a request of Responses goes on from and asks, in the two forms in which it is stored."""

    messages: list[dict[str, Any]]
    """As messages of chat completions, without `instructions`."""
    items: list[dict[str, Any]]
    """As items with identities."""


@dataclass(slots=True)
class Translated:
    """A request of a dialect, and what it asks for as a chat completion."""

    request: Any
    """One of vLLM's protocol classes."""
    chat: ChatRequest
    left_out: list[str] = field(default_factory=list)
    """Parameters that the client sent and that `ignored` names."""
    conversation: Conversation | None = None
    """None in a dialect whose answers are not stored."""

    @property
    def model(self) -> str | None:
        return self.chat.model


def body_of(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Refused (400), also for half of a surrogate pair and for NaN, which no answer
    could repeat."""
    try:
        content = from_json(body, allow_inf_nan=False)
    except (ValueError, RecursionError) as error:
        raise invalid(f"body: is not JSON ({error}); send one JSON object", code="invalid_json") from error
    if not isinstance(content, dict):
        raise invalid("body: is no JSON object; send one", code="invalid_json")
    return content


def validated(kind: type[BaseModel], content: dict[str, Any], place: str = "") -> Any:
    """A request, or at `place` a part of one, of the class `kind`. Raises Refused (400) with the field's path: of
    several complaints, the one that is deepest, because a union complains of every member, and first of those that do
    not fit at all."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        complaint = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
        parts = [str(part) for part in complaint["loc"] if isinstance(part, int) or _is_field(part)]
        path = ".".join(filter(None, (place, *parts))) or "body"
        raise invalid(f"{path}: {complaint['msg'][:300]}; mend the field", path) from None
    except Exception as error:  # vLLM's own checks raise errors of vLLM's, with the field as `parameter`
        param = getattr(error, "parameter", None) or place or None
        raise invalid(f"{param or 'body'}: {' '.join(str(error).split())[:300]}; mend the field", param) from None


def _is_field(part: str) -> bool:
    """Whether a part of a complaint's place is a field: members of unions are types and classes."""
    return part.isidentifier() and part.islower() and part not in ("str", "dict", "bool", "int", "float")


def translated(request: Any, content: dict[str, Any], ignored: Collection[str], left_out: list[str]) -> Translated:
    """The request with its chat completion `content`, checked as one that a client sent. Raises Refused (400)."""
    chat, also_left_out = chat_request(content, ignored)
    return Translated(request, chat, [*left_out, *also_left_out])


def renamed(names: Mapping[str, str]) -> Callable[[Refused], Refused]:
    """Names a refused parameter of chat completions as the dialect does; `names`: parameter -> field."""

    def rename(refused: Refused) -> Refused:
        root, _, rest = (refused.param or "").partition(".")
        if root not in names or names[root] == root:
            return refused
        message = refused.message
        if message.startswith(root):
            message = f"{names[root]} ({root} of chat completions){message[len(root) :]}"
        return Refused(
            refused.status,
            message,
            param=".".join(filter(None, (names[root], rest))),
            code=refused.code,
            headers=refused.headers,
        )

    return rename

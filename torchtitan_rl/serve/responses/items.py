"""The items that a response was made from, as OpenAI lists them: with identities, and with lists of parts for texts."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any

from torchtitan_rl.serve.errors import invalid

__all__ = ["identified", "item_page", "without_nulls"]

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_MOST, _USUAL = 100, 20


def identified(content: Any) -> list[dict[str, Any]]:
    """Items from the `input` of a request that `requests.responses_request` took. An item keeps its identity, or is
    given one."""
    items = [{"role": "user", "content": content}] if isinstance(content, str) else content or []
    return [_identified(item) for item in items]


def _identified(item: dict[str, Any]) -> dict[str, Any]:
    type_ = item.get("type", "message")
    stored_item = without_nulls(item) | {"type": type_}
    stored_item["id"] = item.get("id") or f"{_PREFIXES[type_]}_{secrets.token_hex(12)}"
    if type_ == "message":
        stored_item["content"] = _parts(item["content"], by_policy=item["role"] == "assistant")
    if type_ == "reasoning":
        stored_item.setdefault("summary", [])
    else:
        stored_item["status"] = item.get("status") or "completed"
    return stored_item


def without_nulls(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if value is not None}


def _parts(content: Any, *, by_policy: bool) -> list[dict[str, Any]]:
    """A message's text as parts of the kind that its role has: OpenAI's classes read no other."""
    if isinstance(content, str):
        content = [{"text": content}]
    if by_policy:
        return [{"annotations": []} | part | {"type": "output_text"} for part in content]
    return [{"type": "input_text", "text": part["text"]} for part in content]


def item_page(items: list[dict[str, Any]], parameters: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """A page of items, newest first unless `order` is `asc`; `parameters` are those of the address. Raises Refused
    (400) for a parameter that is not offered, and for one of another form."""
    settings = dict[str, str]()
    for name, value in parameters:
        settings[name] = value
        if name not in ("after", "limit", "order"):
            raise invalid(
                f"{name[:80]}: is not offered: items come whole, with nothing beside them; leave it out",
                name[:80],
                "unsupported_parameter",
            )
    order, limit, after = settings.get("order", "desc"), settings.get("limit", str(_USUAL)), settings.get("after")
    if order not in ("asc", "desc"):
        raise invalid(f"order={order[:40]!r}: is neither asc nor desc; use one of them", "order")
    if not (limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST):
        raise invalid(f"limit={limit[:40]!r}: is no number from 1 to {_MOST}; use one", "limit")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((i for i, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise invalid(f"after={after[:80]!r}: is no item of this response; give the id of one", "after")
        ordered = ordered[place + 1 :]
    page = ordered[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    head = {"object": "list", "data": page, "first_id": first, "last_id": last}
    return head | {"has_more": len(page) < len(ordered)}

"""Responses that a client may name in a later request, in place of sending their items back."""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

__all__ = ["StoredResponse", "StoredResponses"]


@dataclass(slots=True, frozen=True)
class StoredResponse:
    """A response, and the conversation that it ends."""

    whole: dict[str, Any]
    """As the client was sent it."""
    messages: list[dict[str, Any]]
    """The conversation as messages of chat completions, without `instructions`, which hold for one request. Responses
    that go on from each other share the messages, so nobody alters them."""

    items: list[dict[str, Any]] = field(default_factory=list)
    """The conversation before the response as items with identities, shared in the same way."""

    @property
    def num_bytes(self) -> int:
        """Of the response and its whole conversation as JSON, about as many as they have in memory alone."""
        return sum(len(json.dumps(part)) for part in (self.whole, self.messages, self.items))


class StoredResponses:
    """The responses of one client, the least recently used first: at most `max_responses`, of `max_bytes` in all. Older
    ones make way."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()

    def keep(self, response: StoredResponse) -> None:
        num_bytes = response.num_bytes
        self._kept[response.whole["id"]] = (response, num_bytes)
        self.num_bytes += num_bytes
        while len(self._kept) > self.max_responses or self.num_bytes > self.max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1][1]

    def get(self, response_id: str) -> StoredResponse | None:
        """None: no response of this id is kept."""
        if response_id not in self._kept:
            return None
        self._kept.move_to_end(response_id)
        return self._kept[response_id][0]

    def forget(self, response_id: str) -> None:
        """Raises KeyError for an id of which no response is kept."""
        self.num_bytes -= self._kept.pop(response_id)[1]

"""Chat templates, rendered once: siblings begin with the same messages, and often go on with the same."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from typing import Any

from torchtitan_rl.rollout.chat import Chat

__all__ = ["Renderings"]

_MAX_TOKENS = 2**20


class Renderings:
    """What the templates of a gateway's tokenizers rendered last. The tools of a request live as long as the request:
    descriptions of tools are many times as large as their tokens."""

    def __init__(self) -> None:
        self.kept: OrderedDict[bytes, list[int]] = OrderedDict()
        """Digest of what was rendered -> its tokens, the least recently used first; at most `_MAX_TOKENS` in all."""
        self.num_tokens = 0

    def chat(self, tokenizer: Any, tools: list[dict]) -> Chat:
        """The template of a tokenizer with these tools. Raises ValueError for a tokenizer without a template."""
        name = hashlib.blake2b(json.dumps(tools).encode(), digest_size=16).hexdigest()
        return _CachedChat(tokenizer, tools, self, f"{id(tokenizer)} {name}")

    def keep(self, key: bytes, tokens: list[int]) -> None:
        self.kept[key] = tokens
        self.num_tokens += len(tokens)
        while self.num_tokens > _MAX_TOKENS:
            self.num_tokens -= len(self.kept.popitem(last=False)[1])


class _CachedChat(Chat):
    """A `Chat` as workflows use it, whose two renderings are looked up in a gateway's `Renderings` first."""

    def __init__(self, tokenizer: Any, tools: list[dict], renderings: Renderings, name: str) -> None:
        super().__init__(tokenizer, tools or None)
        self._renderings, self._name = renderings, name

    def prompt(self, messages: list) -> list[int]:
        return self._once([messages], lambda: super(_CachedChat, self).prompt(messages))

    def between(self, history: list, following: list, *, more: bool = True) -> list[int]:
        return self._once(
            [history, following, more], lambda: super(_CachedChat, self).between(history, following, more=more)
        )

    def _once(self, arguments: list, render) -> list[int]:
        text = json.dumps([self._name, arguments])
        key, kept = hashlib.blake2b(text.encode(), digest_size=16).digest(), self._renderings.kept
        if key in kept:
            kept.move_to_end(key)
            return kept[key]
        tokens = render()
        self._renderings.keep(key, tokens)
        return tokens

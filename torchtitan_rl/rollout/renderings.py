"""Chat templates, rendered once: siblings begin with the same messages, and often go on with the same."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["Renderings", "digest"]

_MAX_TOKENS = 2**20


class Renderings:
    """What the templates of a gateway's tokenizers rendered last."""

    def __init__(self) -> None:
        self.kept: OrderedDict[bytes, list[int]] = OrderedDict()
        """Digest of what was rendered -> its tokens, the least recently used first; at most `_MAX_TOKENS` in all."""
        self.num_tokens = 0

    def once(self, arguments: Any, render: Callable[[], list[int]]) -> list[int]:
        """The tokens of a rendering. `arguments`, as JSON, say all that `render` depends on."""
        key = digest(arguments)
        if key in self.kept:
            self.kept.move_to_end(key)
            return self.kept[key]
        tokens = self.kept[key] = render()
        self.num_tokens += len(tokens)
        while self.num_tokens > _MAX_TOKENS:
            self.num_tokens -= len(self.kept.popitem(last=False)[1])
        return tokens


def digest(content: Any) -> bytes:
    """A hash of what JSON can say."""
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).digest()

"""The text of single tokens, where tokens are known by their numbers and text by whole turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

__all__ = ["pieces"]

_UNFINISHED = "\ufffd"


def pieces(tokenizer: Tokenizer | Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token, special tokens included; joined they are the text of all. A character of several tokens
    belongs to the last of them. Decodes a few tokens at a time, so the work grows with their number alone."""
    texts: list[str] = []
    first = before = 0
    for end in range(1, len(tokens) + 1):
        earlier_text = tokenizer.decode(list(tokens[first:before]), skip_special_tokens=False)
        text = tokenizer.decode(list(tokens[first:end]), skip_special_tokens=False)
        if text.endswith(_UNFINISHED) and end < len(tokens) and end - before < 8:
            texts.append("")
            continue
        texts.append(text[len(earlier_text) :])
        first, before = before, end
    return texts

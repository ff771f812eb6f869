"""The text of single tokens, where tokens are known by their numbers and text by whole turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

__all__ = ["pieces"]

_UNFINISHED = "\ufffd"
_MAX_PENDING = 8
"""Tokens that wait for the end of a character. A text may itself have U+FFFD, or bytes that are no character."""


def pieces(tokenizer: Tokenizer | Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token, special tokens included; joined they are the text of all. A character of several tokens
    belongs to the last of them. Decodes a few tokens at a time, so the work grows with their number alone."""

    def decoded(first: int, end: int) -> str:
        return tokenizer.decode(list(tokens[first:end]), skip_special_tokens=False)

    texts = [""] * len(tokens)
    first = before = 0
    for end in range(1, len(tokens) + 1):
        text, cut = decoded(first, end), end
        if text.endswith(_UNFINISHED) and end < len(tokens):
            if end - before < _MAX_PENDING:
                continue
            # No cut within a character: three tokens later a character of four bytes has shown its end.
            cuts = range(end - 3, before, -1)
            cut = next((cut for cut in cuts if decoded(first, cut) + decoded(cut, end) == text), end)
        texts[cut - 1] = decoded(first, cut)[len(decoded(first, before)) :]
        first, before = before, cut
    return texts

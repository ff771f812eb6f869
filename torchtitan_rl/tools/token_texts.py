"""The text of single tokens, for records that hold the numbers of tokens and the text of whole turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from torchtitan_rl.health.run_reader import Run

__all__ = ["pieces", "tokenizer_of"]

_BUILT_IN = Path(__file__).parent.parent / "assets"
_UNFINISHED = "\ufffd"


def tokenizer_of(run: Run) -> Tokenizer | None:
    """The tokenizer of a run: of its own `model/` directory, else of the config's `model.assets`. None where neither is
    on this machine."""
    model = run.config().get("model")
    assets = str(model.get("assets", "")) if isinstance(model, dict) else ""
    places = [run.path / "model"]
    if assets:
        places += [_BUILT_IN / assets, Path(assets).expanduser()]
    for place in places:
        if (file := place / "tokenizer.json").is_file():
            try:
                return Tokenizer.from_file(str(file))
            except Exception:  # whatever the file holds; another place may have a better one
                continue
    return None


def pieces(tokenizer: Tokenizer | Any, tokens: Sequence[int]) -> list[str]:
    """The text of each token, special tokens included; joined they are the text of all. A character of several tokens
    belongs to the last of them. Decodes a few tokens at a time, so the work grows with their number alone."""
    texts: list[str] = []
    first = before = 0
    for end in range(1, len(tokens) + 1):
        known = tokenizer.decode(list(tokens[first:before]), skip_special_tokens=False)
        text = tokenizer.decode(list(tokens[first:end]), skip_special_tokens=False)
        if text.endswith(_UNFINISHED) and end < len(tokens) and end - before < 8:
            texts.append("")
            continue
        texts.append(text[len(known) :])
        first, before = before, end
    return texts

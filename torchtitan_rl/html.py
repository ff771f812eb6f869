"""Groups, data and tables as HTML, for notebooks. Whatever a model or a task said is shown as harmless text."""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Html", "datum", "facts", "group", "safe", "tinted"]

_MAX_TEXT, _MAX_TOKENS = 2000, 1000
_UP, _DOWN = "0,114,178", "213,94,0"
"""Blue and orange of Okabe and Ito, which no common form of colour blindness confuses."""
_CELL = 'style="text-align:left;vertical-align:top;white-space:pre-wrap;overflow-wrap:anywhere"'


def safe(text: Any, limit: int = _MAX_TEXT) -> str:
    """A text as HTML that shows it and does nothing else: markup is escaped, characters that control direction or the
    terminal are named (`<U+202E>`), and at most `limit` characters are shown."""
    text = str(text)
    shown = "".join(character if _is_plain(character) else f"<U+{ord(character):04X}>" for character in text[:limit])
    rest = f" ... ({len(text) - limit:,} more characters)" if len(text) > limit else ""
    return html.escape(shown + rest)


def facts(title: str, values: dict[str, Any]) -> str:
    """A table of names and values under a title."""
    rows = "".join(f"<tr><th {_CELL}>{safe(name)}</th><td {_CELL}>{safe(x)}</td></tr>" for name, x in values.items())
    return f"<table><caption>{safe(title)}</caption><tbody>{rows}</tbody></table>"


def group(of: Any, decode: Callable[[list[int]], str] | None = None) -> str:
    """The rollouts of a `RolloutGroup` side by side: reward, advantage, length, and the completion, tinted by
    advantage.
    With `decode` token by token, without it by the recorded text."""
    advantages = of.advantages or [0.0] * len(of.rollouts)
    largest = max(map(abs, advantages), default=0.0)
    rows = []
    for rollout, advantage in zip(of.rollouts, advantages):
        completion = (
            _tint(safe(rollout.text), advantage, largest)
            if decode is None
            else _tinted_tokens(rollout, advantage, largest, decode)
        )
        reward = "" if rollout.reward is None else f"{rollout.reward:.3f}"
        shown = f"{advantage:+.3f}" if of.advantages else ""
        length = sum(len(turn.completion.tokens) for turn in rollout.turns)
        cells = (safe(rollout.id), reward, shown, str(length), completion)
        rows.append("<tr>" + "".join(f"<td {_CELL}>{cell}</td>" for cell in cells) + "</tr>")
    prompt = safe(of.rollouts[0].task.prompt) if of.rollouts else "no rollouts"
    left_out = f" (left out: {safe(of.left_out)})" if of.left_out else ""
    heads = "".join(f"<th>{name}</th>" for name in ("rollout", "reward", "advantage", "tokens", "completion"))
    return (
        f"<table><caption {_CELL}>group {safe(of.id)}{left_out}: {prompt}</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def datum(of: Any, decode: Callable[[list[int]], str] | None = None) -> str:
    """The targets of a `Datum` in order: those that train tinted by advantage, the others grey. Without
    `decode` as token ids. Of several targets per position the first is shown."""
    inputs, targets = of.loss_inputs, of.target_tokens
    mask = inputs["loss_mask"].tolist() if "loss_mask" in inputs else [0.0] * len(of)
    weighs = "advantages" if "advantages" in inputs else "token_weights"
    column = inputs.get(weighs)
    values = column.tolist() if column is not None and column.dim() == 1 else [0.0] * len(of)
    largest = max((abs(value) for value, trains in zip(values, mask) if trains), default=0.0)
    pieces = []
    for token, value, trains in list(zip(targets.reshape(len(of), -1)[:, 0].tolist(), values, mask))[:_MAX_TOKENS]:
        text = safe(token if decode is None else decode([token]))
        title = f"token {token}, {weighs[:-1].replace('_', ' ')} {value:+.3g}"
        pieces.append(_tint(text, value, largest, title) if trains else f'<span style="opacity:.5">{text}</span>')
    rest = f" ... ({len(of) - _MAX_TOKENS:,} more tokens)" if len(of) > _MAX_TOKENS else ""
    caption = f"{len(of)} tokens, {int(sum(mask))} of them trained, tinted by {weighs.replace('_', ' ')}"
    between = " " if decode is None else ""
    return f"<div {_CELL}><div>{caption}</div>{between.join(pieces)}{rest}</div>"


class Html:
    """HTML that a notebook shows as the result of a cell."""

    def __init__(self, text: str) -> None:
        self.text = text

    def _repr_html_(self) -> str:
        return self.text


def tinted(of: Any, tokenizer: Any) -> Html:
    """A `RolloutGroup` or a `Datum` with its tokens as text, each tinted by its advantage. Example:
    `tinted(groups[0], controller.tokenizer)` as the last line of a cell."""
    return Html(datum(of, tokenizer.decode) if hasattr(of, "loss_inputs") else group(of, tokenizer.decode))


def _tinted_tokens(rollout: Any, advantage: float, largest: float, decode: Callable[[list[int]], str]) -> str:
    """Every turn's sampled tokens, one by one, tinted by the turn's own advantages where it has some."""
    turns = []
    for turn in rollout.turns:
        tokens, own = turn.completion.tokens, turn.advantages
        each = list(own) if isinstance(own, Iterable) else [advantage if own is None else own] * len(tokens)
        most = largest if own is None else max(map(abs, each), default=0.0)
        versions, logprobs = turn.completion.policy_versions, turn.completion.logprobs
        shown = [
            _tint(safe(decode([token])), value, most, f"token {token}, log-probability {p:.3f}, version {version}")
            for token, value, p, version in list(zip(tokens, each, logprobs, versions))[:_MAX_TOKENS]
        ]
        rest = f" ... ({len(tokens) - _MAX_TOKENS:,} more tokens)" if len(tokens) > _MAX_TOKENS else ""
        turns.append("".join(shown) + rest)
    return "<hr>".join(turns)


def _tint(shown: str, value: float, largest: float, title: str = "") -> str:
    """`shown`, which is HTML, on blue for a positive value and on orange for a negative one."""
    share = abs(value) / largest if largest and math.isfinite(value / largest) else 0.0
    color = f"rgba({_UP if value > 0 else _DOWN},{0.6 * share:.2f})"
    return f'<span style="background:{color}" title="{html.escape(title)}">{shown}</span>'


def _is_plain(character: str) -> bool:
    return character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")

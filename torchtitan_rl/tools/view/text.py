"""Text and numbers as the page shows them. Whatever a model said is hostile until it has been through `visible`."""

from __future__ import annotations

import math
import re
import unicodedata
from datetime import datetime
from typing import Any

from markupsafe import Markup, escape

from torchtitan_rl.tools.rollout_tokens import Token

__all__ = ["CHUNK", "CUT", "TINTS", "clock", "cut", "number", "chunks", "tint", "side", "token_title", "visible"]

CUT = 6000
"""Characters of a text that are shown before it is asked for whole."""
CHUNK = 8000
"""Characters of a whole text that are laid out at a time."""
TINTS = {
    "none": ("no tint", ()),
    "advantage": ("advantage", (0.0, 0.25, 0.5, 1.0, 2.0)),
    "gap": ("log-prob gap", (0.001, 0.01, 0.03, 0.1, 0.3)),
    "ratio": ("ratio", (0.01, 0.03, 0.1, 0.2, 0.5)),
}
"""Tint -> its name, and the sizes from which each of five shades is used; a ratio counts by its logarithm."""

# Control characters, and whatever is invisible or changes the direction of what follows. Tabs and line feeds are text.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\u3164\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)


def visible(text: Any) -> Markup:
    """Text that is safe to put between tags: escaped, and with a mark in place of each character that nobody would
    see, or that would turn the direction of what follows."""
    if text is None:
        return Markup("")
    return Markup(_UNSEEN.sub(_mark, str(escape(str(text)))))


def _mark(match: re.Match[str]) -> str:
    code = ord(match[0])
    name = unicodedata.name(match[0], "control character")
    shown = chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"U+{code:04X}"
    return f'<span class="unseen" title="U+{code:04X} {name}">{shown}</span>'


def cut(text: str | None, limit: int = CUT) -> str:
    """The beginning of a text."""
    return (text or "")[:limit]


def chunks(text: str) -> list[str]:
    """A text in pieces that a browser lays out one at a time."""
    return [text[i : i + CHUNK] for i in range(0, len(text), CHUNK)]


def number(value: Any, digits: int = 3) -> str:
    """A number for people; a dash for none."""
    if value is None or isinstance(value, str):
        return value or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f") if abs(value) >= 10_000 else str(value)
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}f}".replace("-", "−")
    return f"{value:.{max(1, digits - 1)}e}".replace("-", "−")


def clock(at: Any) -> str:
    """An ISO time as date and time of day here; as it is where it is none."""
    try:
        return datetime.fromisoformat(at).astimezone().strftime("%m-%d %H:%M:%S")
    except (TypeError, ValueError):
        return str(at or "")


def tint(token: Token, kind: str) -> str:
    """The class of a token: `p1` to `p5` above zero, `n1` to `n5` below; and whether it trained, and was clipped."""
    value = {"advantage": token.advantage, "gap": token.gap, "ratio": token.ratio}.get(kind)
    if kind == "ratio" and value:
        value = math.log(value)
    classes = ["t"]
    if value:
        shade = sum(abs(value) >= size for size in TINTS[kind][1])
        classes += [f"{'p' if value > 0 else 'n'}{shade}"] if shade else []
    if token.trained is False:
        classes.append("untrained")
    if token.clipped:
        classes.append("clipped")
    return " ".join(classes)


def side(advantage: float | None) -> str:
    """The class of a reward: better or worse than its siblings'."""
    return "" if not advantage else "high" if advantage > 0 else "low"


def token_title(token: Token, index: int) -> str:
    """What is known of a token, in a line."""
    parts = [f"token {index}", f"id {token.number}"]
    for name, value in (
        ("generator", token.generator),
        ("trainer", token.trainer),
        ("gap", token.gap),
        ("old", token.old),
        ("ratio", token.ratio),
        ("advantage", token.advantage),
        ("weight", token.weight),
    ):
        if value is not None:
            parts.append(f"{name} {number(value, 4)}")
    if token.clipped:
        parts.append("clipped")
    if token.trained is False:
        parts.append("not trained")
    if token.version is not None:
        parts.append(f"version {token.version}")
    return " · ".join(parts)

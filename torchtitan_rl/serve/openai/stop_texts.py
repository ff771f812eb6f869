"""Texts of a request at which an answer ends. The policy may have sampled on behind them."""

from __future__ import annotations

__all__ = ["cut", "stopped_by"]


def cut(text: str, stops: list[str]) -> str:
    """The text up to the first stop text."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


def stopped_by(text: str, stops: list[str]) -> str | None:
    """The stop text at which `cut` ends the text; None: there is none."""
    ends = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(ends)[1] if ends else None

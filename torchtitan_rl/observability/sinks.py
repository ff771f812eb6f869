"""The first listeners of a run: its directory, and the display of whoever started it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torchtitan_rl.observability.progress import Bar, Progress
from torchtitan_rl.observability.recorder import Listener, Span
from torchtitan_rl.observability.run_dir import RunDir

__all__ = ["JsonLines", "Display"]


class JsonLines(Listener):
    """Writes metrics and rollouts to a run's directory, a line each."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir

    def fact(self, kind: str, what: dict[str, Any]) -> None:
        if kind == "metrics":
            self.run_dir.log_metrics(what["line"])
        elif kind == "rollouts":
            self.run_dir.log_rollouts(what["step"], "reinforcement", what["groups"])


class Display(Listener):
    """Shows metrics as lines, and spans that consist of pieces or are meant to be seen as bars."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._open: dict[int, tuple[Bar, AbstractContextManager]] = {}

    def fact(self, kind: str, what: dict[str, Any]) -> None:
        if kind == "metrics" and what["text"]:
            self.progress.line(what["text"])

    def begin(self, span: Span) -> None:
        if not span.total and not span.shown:
            return
        if span.total:
            context = self.progress.phase(span.name, span.total)
        else:
            context = self.progress.waiting(span.name, span.expected_s or None)
        self._open[id(span)] = context.__enter__(), context

    def advance(self, span: Span, pieces: int, text: str) -> None:
        if id(span) in self._open:
            self._open[id(span)][0].advance(pieces, text=text)

    def end(self, span: Span, failed: bool) -> None:
        if id(span) in self._open:
            _, context = self._open.pop(id(span))
            # A bar whose phase has failed says "stopped" where others say "done".
            context.__exit__(*((RuntimeError, RuntimeError(span.name), None) if failed else (None, None, None)))

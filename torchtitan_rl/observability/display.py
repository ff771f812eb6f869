"""A listener of the recorder that draws a progress display."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from torchtitan_rl.observability.progress import Bar, Progress
from torchtitan_rl.observability.recorder import Listener, Span

__all__ = ["Display"]


logger = logging.getLogger(__name__)

_NO_SIGNAL_FRAC, _NO_SIGNAL_STEPS = 0.9, 10


class Display(Listener):
    """Shows metrics as lines, and as bars each span that has a `total` or is `shown`.

    With `compares`, where the rewards of siblings are what trains, warns once when almost all groups have been without
    signal for some steps."""

    def __init__(self, progress: Progress, compares: bool = False) -> None:
        self.progress, self._compares = progress, compares
        self._no_signal = 0
        self._open: dict[int, tuple[Bar, AbstractContextManager]] = {}

    def fact(self, kind: str, what: dict[str, Any]) -> None:
        if kind == "note":
            self.progress.line(what["text"])
        elif kind == "metrics":
            self.progress.metrics(what["line"], what["text"])
            if self._compares:
                self._watch_signal(what["line"].get("reward/zero_std_frac"))

    def _watch_signal(self, frac: float | None) -> None:
        if frac is None:
            return
        self._no_signal = self._no_signal + 1 if frac >= _NO_SIGNAL_FRAC else 0
        if self._no_signal == _NO_SIGNAL_STEPS:
            self._compares = False  # said once
            logger.warning(
                "reward/zero_std_frac=%.2f: for %d steps the rewards of almost every group have been equal, from which "
                "nothing is learned; grade the reward, choose easier or harder tasks, or raise algorithm.group_size",
                frac,
                _NO_SIGNAL_STEPS,
            )

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
            # The line of a failed phase says "stopped" instead of "done".
            context.__exit__(*((RuntimeError, RuntimeError(span.name), None) if failed else (None, None, None)))

"""A listener of the recorder that draws a progress display."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torchtitan_rl.record.console.json_progress import JsonProgress
from torchtitan_rl.record.console.progress import Bar, Progress
from torchtitan_rl.record.recorder import Listener, Metrics, Note, Span

__all__ = ["Display"]


class Display(Listener):
    """Shows metrics as lines, and as bars each span that has a `total` or is `shown`."""

    def __init__(self, progress: Progress | JsonProgress) -> None:
        self.progress = progress
        self._open: dict[int, tuple[Bar, AbstractContextManager]] = {}

    def note(self, event: Note) -> None:
        self.progress.line(event.text)

    def metrics(self, event: Metrics) -> None:
        self.progress.metrics(event.line, event.text)

    def begin(self, span: Span) -> None:
        if not span.total and not span.shown:
            return
        if span.total:
            context = self.progress.phase(span.name, span.total, span.done)
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

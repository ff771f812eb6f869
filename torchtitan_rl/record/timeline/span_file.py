"""A process's spans on disk: JSON lines, written by a thread, never at the cost of the run."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

from torchtitan_rl.record.json_lines import append_lines, json_line
from torchtitan_rl.record.tracing import Kind

__all__ = ["SpanFile", "Leaf", "KIND", "THREAD", "WRITE_S"]

logger = logging.getLogger(__name__)

WRITE_S = 1.0
"""Seconds after which a process's spans are on disk; a process that is killed loses what is younger."""
KIND, THREAD = "timeline.kind", "timeline.thread"
"""The names of the attributes that hold a span's kind, and the name of the thread that made it."""


class Leaf(NamedTuple):
    """A leaf that is no span of OpenTelemetry's, because only the file wants it."""

    name: str
    kind: Kind
    start: int
    end: int
    thread: str
    parent: Context
    attributes: Mapping[str, Any] | None


class SpanFile(SpanProcessor):
    """Writes the spans of a process to `path`, one JSON object a line, after a first line with `header`.

    A thread writes every `every_s` seconds what has come. At most `room` spans wait for it: more are dropped and
    counted, and so is what a full disk refuses. The next line that can be written says how many were dropped.
    """

    def __init__(self, path: Path, header: dict[str, Any], room: int = 20_000, every_s: float = WRITE_S) -> None:
        self.path, self.dropped = path, 0
        self.before_write: Callable[[], None] = lambda: None
        """Called before each write, by the thread that writes."""
        self._room, self._every_s, self._warned = room, every_s, False
        self._header = json_line(header)
        """The file's first line; empty once the file has it."""
        self._waiting: deque[ReadableSpan | Leaf] = deque()
        self._closing, self._writing = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._write_on, name="timeline", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context=None) -> None:
        """Nothing: a span is written once it has ended."""

    def on_end(self, span: ReadableSpan) -> None:
        self.add(span)

    def add(self, span: ReadableSpan | Leaf) -> None:
        """Has a span written, unless the file is closed or too many wait."""
        if self._closing.is_set():
            return
        if len(self._waiting) >= self._room:
            self.dropped += 1
        else:
            self._waiting.append(span)

    def shutdown(self, patience_s: float = 5.0) -> None:
        """Writes what waits. Gives up after `patience_s`, and then loses it."""
        if not self._closing.is_set():
            self.before_write()
            self._closing.set()
            self._thread.join(patience_s)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Writes what waits."""
        self.before_write()
        self._write()
        return True

    def _write_on(self) -> None:
        while not self._closing.wait(self._every_s):
            self.before_write()
            self._write()
        self._write()

    def _write(self) -> None:
        with self._writing:
            dropped, number = self.dropped, len(self._waiting)
            lines = [self._header, *(_line(self._waiting.popleft()) for _ in range(number))]
            if dropped:
                lines.append(json_line({"dropped": dropped}))
            if not any(lines):
                return
            try:
                append_lines(self.path, b"".join(lines))
                self._header, self.dropped = b"", self.dropped - dropped
            except OSError as error:
                self.dropped += number
                if not self._warned:
                    self._warned = True
                    logger.warning("timeline: %s cannot be written, the run goes on without: %s", self.path, error)


def _line(span: ReadableSpan | Leaf) -> bytes:
    if isinstance(span, Leaf):
        name, kind, start, end, thread, parent, attributes = span
        more, number = dict(attributes or {}), 0
        above = trace.get_current_span(parent).get_span_context().span_id
    else:
        more, number = dict(span.attributes or {}), span.context.span_id
        name, kind, start, end = span.name, more.pop(KIND, "work"), span.start_time, span.end_time
        thread, above = more.pop(THREAD, ""), 0 if span.parent is None else span.parent.span_id
    content = {"name": name, "kind": kind, "start": start, "end": end, "thread": thread, "id": number, "in": above}
    more = {f"attribute.{key}" if key in content else key: value for key, value in more.items()}
    try:
        return json_line(content | more)
    except TypeError:  # bytes, which OpenTelemetry allows and JSON does not
        return json_line(content | {key: str(value) for key, value in more.items()})

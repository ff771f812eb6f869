"""Events of a run. The loop tells a `Recorder` facts and spans; listeners write, draw or count them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Recorder", "Listener", "Span", "Aside"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class Span:
    """A stretch of a run, with its time. A span with a `total` consists of that many equal pieces."""

    name: str
    total: int = 0
    expected_s: float = 0.0
    """The usual duration; 0: unknown."""
    shown: bool = False
    """Whether a display shows the span although it has no `total`."""
    began: float = field(default_factory=time.perf_counter)
    """`time.perf_counter()` at the beginning; `ended` is the same at the end."""
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """Duration of the span; until now if the span has not ended."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.began


class Listener:
    """Receives the events of a recorder. The methods do nothing; a subclass overrides the methods that it needs."""

    def fact(self, kind: str, what: dict[str, Any]) -> None:
        """`kind` and `what` are the arguments of `Recorder.fact`."""

    def begin(self, span: Span) -> None:
        """A span has begun."""

    def advance(self, span: Span, pieces: int, text: str) -> None:
        """`pieces` more pieces of a span are done; `text` has current numbers."""

    def end(self, span: Span, failed: bool) -> None:
        """A span has ended; `failed`: by an exception."""

    def beat(self) -> None:
        """Some time has passed without an event; only an `Aside` with `beat_s` calls this."""

    def close(self) -> None:
        """The run has ended: whatever the listener holds back is written."""


class Aside(Listener):
    """A listener that hears events in a thread of its own, so that nothing it does can fail or delay the run.

    The loop puts events into a queue of at most `room`; a full queue drops the event. The first event that fails, and
    the first that is dropped, are reported as warnings, once each. Events are read later than they are told: a listener
    behind an `Aside` must not change a `line`, and finds a `Span` as it is then.
    Example: `Recorder([writer, Aside(TensorBoard(path), name="tensorboard")])`.
    """

    def __init__(
        self, listener: Listener, name: str, room: int = 10_000, patience_s: float = 10.0, beat_s: float | None = None
    ) -> None:
        """`patience_s`: seconds that `close` waits for what is still in the queue. After each `beat_s` seconds without
        an event the listener's `beat` is called; None: never."""
        self.listener, self.name, self.patience_s, self._beat_s = listener, name, patience_s, beat_s
        self._events: queue.Queue = queue.Queue(room)
        self._reported: set[str] = set()
        self._thread = threading.Thread(target=self._hear, name=f"aside-{name}", daemon=True)
        self._thread.start()

    def fact(self, kind: str, what: dict[str, Any]) -> None:
        self._put("fact", kind, what)

    def begin(self, span: Span) -> None:
        self._put("begin", span)

    def advance(self, span: Span, pieces: int, text: str) -> None:
        self._put("advance", span, pieces, text)

    def end(self, span: Span, failed: bool) -> None:
        self._put("end", span, failed)

    def close(self) -> None:
        self._put("close")
        self._thread.join(self.patience_s)
        if self._thread.is_alive():
            self._report("late", f"{self.name}: still busy {self.patience_s:.0f} s after the run's end; given up")

    def _put(self, method: str, *arguments: Any) -> None:
        try:
            self._events.put_nowait((method, arguments))
        except queue.Full:
            self._report("full", f"{self.name}: has not kept up with the run; what it missed is in metrics.jsonl")

    def _hear(self) -> None:
        method = ""
        while method != "close":
            try:
                method, arguments = self._events.get(timeout=self._beat_s)
            except queue.Empty:
                method, arguments = "beat", ()
            try:
                getattr(self.listener, method)(*arguments)
            except Exception as error:
                self._report("failed", f"{self.name}: {type(error).__name__}: {error}; the run goes on without it")

    def _report(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            logger.warning("%s", text)


class Recorder:
    """Passes facts and spans on to every listener, in order. A listener may add to the `line` of `metrics`.

    Kinds of facts: `metrics` (`line`, one line of metrics; `text`, the line in words), `trained` (`sequences`, the
    datums of a batch with the policy's log-probabilities), `rollouts` (`step`, `groups`), `draws` (`step`, `records` of
    `run.draws`), `version` (`step`, `version`, `seconds` of the publication), `note` (`text`),
    `generator` (`client`, the sampling client, once it has started).
    Example::

        with recorder.span("generate") as span:
            ...
        recorder.fact("metrics", line={"step": 1, "phase": "reinforcement", "time/generate_s": span.seconds}, text="")
    """

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = list(listeners)

    def fact(self, kind: str, **what: Any) -> None:
        for listener in self.listeners:
            listener.fact(kind, what)

    def advance(self, span: Span, pieces: int = 1, text: str = "") -> None:
        for listener in self.listeners:
            listener.advance(span, pieces, text)

    @contextmanager
    def span(self, name: str, *, total: int = 0, expected_s: float = 0.0, shown: bool = False) -> Iterator[Span]:
        """A context manager that times its block; yields the `Span`."""
        span = Span(name=name, total=total, expected_s=expected_s, shown=shown)
        for listener in self.listeners:
            listener.begin(span)
        failed = True
        try:
            yield span
            failed = False
        finally:
            span.ended = time.perf_counter()
            for listener in self.listeners:
                listener.end(span, failed)

    def close(self) -> None:
        """Tells every listener that the run has ended."""
        for listener in self.listeners:
            listener.close()

"""Events of a run. The loop tells a `Recorder` facts and spans; listeners write, draw or count them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Recorder", "Listener", "Span"]


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

    def wait(self) -> None:
        """Returns when `close` is done; only a listener that closes in the background waits."""


class Recorder:
    """Passes facts and spans on to every listener, in order. A listener may add to the `line` of `metrics`.

    Kinds of facts: `metrics` (`line`, one line of metrics; `text`, the line in words), `trained` (`sequences`, the
    datums of a batch with the policy's log-probabilities), `rollouts` (`step`, `groups`), `evaluated` (`step`,
    `records` of the table `evaluations`), `draws` (`step`, `records` of `rollout.draws`), `version` (`step`, `version`,
    `seconds` of the publication), `note` (`text`), `generator` (`client`, the sampling client, once it has started).
    Example: `with recorder.span("generate") as span: ...`, then `recorder.fact("note", text=f"{span.seconds} s")`.
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
        for listener in self.listeners:
            listener.wait()

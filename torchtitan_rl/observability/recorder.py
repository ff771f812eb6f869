"""What happens in a run, told once. The loop tells a `Recorder` facts and spans; whoever wants to know listens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Recorder", "Listener", "Span"]


@dataclass(kw_only=True, slots=True)
class Span:
    """Something that takes time. A span with a `total` consists of that many equal pieces."""

    name: str
    total: int = 0
    expected_s: float = 0.0
    """How long it usually takes; 0: nobody knows."""
    shown: bool = False
    """Whether a person should see that the run is busy with it."""
    began: float = field(default_factory=time.perf_counter)
    """By `time.perf_counter`, as is `ended`."""
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (time.perf_counter() if self.ended is None else self.ended) - self.began


class Listener:
    """Hears what a recorder is told. The methods do nothing; a listener has those that it cares about."""

    def fact(self, kind: str, what: dict[str, Any]) -> None:
        """Something that is so: `kind` says what, as `Recorder.fact` was called."""

    def begin(self, span: Span) -> None:
        """A span has begun."""

    def advance(self, span: Span, pieces: int, text: str) -> None:
        """So many more pieces of a span are done; `text` has its current numbers."""

    def end(self, span: Span, failed: bool) -> None:
        """A span has ended, by an exception if it `failed`."""


class Recorder:
    """Passes on, in order, what it is told.

    Kinds of facts: `metrics` (`line`, one line of metrics; `text`, the same for a person), `rollouts` (`step`,
    `groups`). Example::

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
        """A context manager around something that takes time; yields its `Span`."""
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

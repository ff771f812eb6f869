"""Events of a run: what the loop says happened, who listens, and the recorder that passes one on to the other.

An event is a small dataclass, and a listener has one method per event::

    recorder.record(Metrics(line=line, text="step 3: reward 0.5"))   # calls each listener's metrics(event)
    with recorder.span("generate") as span: ...                      # calls begin(span), then end(span, failed)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from torchtitan_rl.types import Datum, RolloutGroup

__all__ = [
    "DrawEvents",
    "EvaluatedAttempts",
    "Event",
    "EventListener",
    "GeneratorStarted",
    "Listener",
    "Metrics",
    "Note",
    "Published",
    "Recorder",
    "RolloutsEnded",
    "Span",
    "TrainedOn",
    "Warned",
]


@dataclass(kw_only=True, slots=True)
class Span:
    """A stretch of a run, with its time. A span with a `total` consists of that many equal pieces."""

    name: str
    total: int = 0
    done: int = 0
    """Pieces that were done before it began: those of a run that goes on."""
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

    def metrics(self, event: Metrics) -> None:
        """A line of metrics is complete."""

    def trained(self, event: TrainedOn) -> None:
        """A batch has trained."""

    def rollouts(self, event: RolloutsEnded) -> None:
        """The rollouts of a batch are judged, and the batch has trained."""

    def evaluated(self, event: EvaluatedAttempts) -> None:
        """An evaluation has completions to keep."""

    def draws(self, event: DrawEvents) -> None:
        """Draws were admitted, or have ended."""

    def published(self, event: Published) -> None:
        """The generators serve a version of the weights."""

    def note(self, event: Note) -> None:
        """A sentence for the person who watches."""

    def generator_started(self, event: GeneratorStarted) -> None:
        """The sampling client is there."""

    def warned(self, event: Warned) -> None:
        """This package logged a warning or an error in the controller's process, or the run ends early."""

    def begin(self, span: Span) -> None:
        """A span has begun."""

    def advance(self, span: Span, pieces: int, text: str) -> None:
        """`pieces` more pieces of a span are done; `text` has current numbers."""

    def end(self, span: Span, failed: bool) -> None:
        """A span has ended; `failed`: by an exception."""

    def beat(self) -> None:
        """Some time has passed without an event; only a `BackgroundListener` with `beat_s` calls this."""

    def close(self) -> None:
        """The run has ended: whatever the listener holds back is written."""

    def wait(self) -> None:
        """Returns when `close` is done; only a listener that closes in the background waits."""


class EventListener(Listener):
    """A listener to which all events are alike: it overrides `event`."""

    def event(self, event: Event) -> None:
        """Something happened."""

    def metrics(self, event: Metrics) -> None:
        self.event(event)

    def trained(self, event: TrainedOn) -> None:
        self.event(event)

    def rollouts(self, event: RolloutsEnded) -> None:
        self.event(event)

    def evaluated(self, event: EvaluatedAttempts) -> None:
        self.event(event)

    def draws(self, event: DrawEvents) -> None:
        self.event(event)

    def published(self, event: Published) -> None:
        self.event(event)

    def note(self, event: Note) -> None:
        self.event(event)

    def generator_started(self, event: GeneratorStarted) -> None:
        self.event(event)

    def warned(self, event: Warned) -> None:
        self.event(event)


class Event(Protocol):
    """Something that happened in a run. `deliver` calls the method of a listener that is for this kind of event."""

    def deliver(self, listener: Listener) -> None: ...


@dataclass(kw_only=True, slots=True)
class Metrics:
    """One complete line of metrics. No listener changes it."""

    line: dict[str, Any]
    text: str = ""
    """The line in words, for the console; empty: it is not shown."""

    def deliver(self, listener: Listener) -> None:
        listener.metrics(self)


@dataclass(kw_only=True, slots=True)
class TrainedOn:
    """What a batch trained on."""

    sequences: Sequence[tuple[Datum, torch.Tensor]]
    """Datums with the policy's log-probabilities before the step."""

    def deliver(self, listener: Listener) -> None:
        listener.trained(self)


@dataclass(kw_only=True, slots=True)
class RolloutsEnded:
    """The groups of a batch, those that filters left out included."""

    step: int
    groups: list[RolloutGroup]

    def deliver(self, listener: Listener) -> None:
        listener.rollouts(self)


@dataclass(kw_only=True, slots=True)
class EvaluatedAttempts:
    """Records of an evaluation's attempts, for the table `evaluations`."""

    step: int
    records: list[dict[str, Any]]

    def deliver(self, listener: Listener) -> None:
        listener.evaluated(self)


@dataclass(kw_only=True, slots=True)
class DrawEvents:
    """Records of draws that were admitted or have ended; see `rollout.draws`."""

    step: int
    records: list[dict[str, Any]]

    def deliver(self, listener: Listener) -> None:
        listener.draws(self)


@dataclass(kw_only=True, slots=True)
class Published:
    """A publication of the policy's weights."""

    step: int
    version: int
    seconds: float

    def deliver(self, listener: Listener) -> None:
        listener.published(self)


@dataclass(kw_only=True, slots=True)
class Note:
    text: str

    def deliver(self, listener: Listener) -> None:
        listener.note(self)


@dataclass(kw_only=True, slots=True)
class GeneratorStarted:
    client: Any
    """The `SamplingClient`."""

    def deliver(self, listener: Listener) -> None:
        listener.generator_started(self)


@dataclass(kw_only=True, slots=True)
class Warned:
    """A warning or an error, as a record of the table `events`."""

    at: str
    """ISO 8601 with milliseconds and zone."""
    level: str
    kind: str
    """What happened, such as `replica_lost`; else the level."""
    who: str
    """What it happened to, such as `generator-1`; empty: nobody in particular."""
    text: str

    def deliver(self, listener: Listener) -> None:
        listener.warned(self)


class Recorder:
    """Passes events and spans on to every listener, in order."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = list(listeners)

    def record(self, event: Event) -> None:
        """Delivers an event to every listener."""
        for listener in self.listeners:
            event.deliver(listener)

    def advance(self, span: Span, pieces: int = 1, text: str = "") -> None:
        for listener in self.listeners:
            listener.advance(span, pieces, text)

    @contextmanager
    def span(
        self, name: str, *, total: int = 0, done: int = 0, expected_s: float = 0.0, shown: bool = False
    ) -> Iterator[Span]:
        """A context manager that times its block; yields the `Span`."""
        span = Span(name=name, total=total, done=done, expected_s=expected_s, shown=shown)
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

"""Listeners of users that have the former method `fact(kind, what)`, for one version."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from torchtitan_rl.record.recorder import Event, EventListener, Span

__all__ = ["FactListener"]

_KINDS = {
    "Metrics": "metrics",
    "TrainedOn": "trained",
    "RolloutsEnded": "rollouts",
    "EvaluatedAttempts": "evaluated",
    "DrawEvents": "draws",
    "Published": "version",
    "Note": "note",
    "GeneratorStarted": "generator",
    "Warned": "event",
}
"""Class of an event -> its former name."""


class FactListener(EventListener):
    """Calls `fact(kind, fields)` of a listener for each event, with the kind's former name."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._listener = make()
        warnings.warn(
            f"{type(self._listener).__name__}.fact: listeners have a method per event now; override "
            "Listener.metrics(event) and its like (torchtitan_rl.record.recorder)",
            DeprecationWarning,
            stacklevel=2,
        )

    def event(self, event: Event) -> None:
        fields = dataclasses.fields(event)  # type: ignore[arg-type]  # every event is a dataclass
        self._listener.fact(_KINDS[type(event).__name__], {field.name: getattr(event, field.name) for field in fields})

    def begin(self, span: Span) -> None:
        self._listener.begin(span)

    def advance(self, span: Span, pieces: int, text: str) -> None:
        self._listener.advance(span, pieces, text)

    def end(self, span: Span, failed: bool) -> None:
        self._listener.end(span, failed)

    def close(self) -> None:
        self._listener.close()

    def wait(self) -> None:
        self._listener.wait()

"""Listeners of users that have the former method `fact(kind, what)`, for one version."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from torchtitan_rl.record.recorder import (
    DrawEvents,
    Evaluated,
    Event,
    GeneratorStarted,
    Listener,
    Metrics,
    Note,
    Published,
    RolloutsEnded,
    Span,
    TrainedOn,
    Warned,
)

__all__ = ["FactListener"]


class FactListener(Listener):
    """Calls `fact(kind, fields)` of a listener for each event, with the kind's former name."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._listener = make()
        warnings.warn(
            f"{type(self._listener).__name__}.fact: listeners have a method per event now; override "
            "Listener.metrics(event) and its like (torchtitan_rl.record.recorder)",
            DeprecationWarning,
            stacklevel=2,
        )

    def _pass_on(self, kind: str, event: Event) -> None:
        fields = dataclasses.fields(event)  # type: ignore[arg-type]  # every event is a dataclass
        self._listener.fact(kind, {field.name: getattr(event, field.name) for field in fields})

    def metrics(self, event: Metrics) -> None:
        self._pass_on("metrics", event)

    def trained(self, event: TrainedOn) -> None:
        self._pass_on("trained", event)

    def rollouts(self, event: RolloutsEnded) -> None:
        self._pass_on("rollouts", event)

    def evaluated(self, event: Evaluated) -> None:
        self._pass_on("evaluated", event)

    def draws(self, event: DrawEvents) -> None:
        self._pass_on("draws", event)

    def published(self, event: Published) -> None:
        self._pass_on("version", event)

    def note(self, event: Note) -> None:
        self._pass_on("note", event)

    def generator_started(self, event: GeneratorStarted) -> None:
        self._pass_on("generator", event)

    def warned(self, event: Warned) -> None:
        self._pass_on("event", event)

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

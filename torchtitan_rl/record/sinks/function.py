"""A sink of one's own: a function that is called with every line of metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchtitan_rl.record.recorder import Listener, Metrics

__all__ = ["FunctionSink"]


class FunctionSink(Listener):
    """Calls `function` with a copy of every line of metrics, in order."""

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self._function = function

    def metrics(self, event: Metrics) -> None:
        self._function(dict(event.line))

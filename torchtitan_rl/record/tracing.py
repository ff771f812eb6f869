"""What the code of a run calls to have its time recorded: `span`, `running`, `served`.

Free of OpenTelemetry, so that every module may import it. Where this process records no timeline, each of the three
costs one look at `_tracer`.
"""

from __future__ import annotations

from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, TypeVar

__all__ = ["Kind", "Tracer", "GARBAGE", "span", "running", "served", "record_into"]

Kind = Literal["phase", "work", "wait"]
"""`phase`: other spans say what happened in it. `work`, `wait`: a leaf, which says what its whole time was."""
GARBAGE = "collect garbage"
"""Work of Python's garbage collector, which stops every thread of the process, whichever it is in."""

_Result = TypeVar("_Result")


class Tracer(Protocol):
    """`timeline.spans.Spans`, which imports OpenTelemetry, as a process that records no timeline knows it."""

    def span(self, name: str, kind: Kind, attributes: dict[str, int]) -> AbstractContextManager: ...

    def running(self, name: str, coroutine: Coroutine[Any, Any, _Result]) -> Coroutine[Any, Any, _Result]: ...

    def served(self, name: str) -> AbstractContextManager: ...


_tracer: Tracer | None = None
"""What records this process; None: nothing does."""
_UNRECORDED = nullcontext()


def record_into(tracer: Tracer | None) -> None:
    """Has `tracer` record this process from now on; None: nothing."""
    global _tracer
    _tracer = tracer


def span(name: str, *, kind: Kind | None = None, **attributes: int) -> AbstractContextManager:
    """A context manager whose block is recorded under `name`. Without a `kind`, `wait for ...` is a wait and any other
    name is work.

    The whole block counts, also while it awaits; of a coroutine that is work, `running` counts what it runs. Waits of
    one name that overlap are one span, unless they have attributes. A span begins when `span` is called, and not when
    its block is entered: the wait for an answer is made where the call is sent, and entered by the task that awaits.

    Example: `with span("load weights", version=3): ...`, `with span("wait for rewards"): await ...`.
    """
    if _tracer is None:
        return _UNRECORDED
    return _tracer.span(name, kind or ("wait" if name.startswith("wait for ") else "work"), attributes)


def running(name: str, coroutine: Coroutine[Any, Any, _Result]) -> Coroutine[Any, Any, _Result]:
    """The coroutine, with the time in which it runs recorded as work under `name`. The time in which it is suspended is
    not its work; a `span` around the call names that wait.

    Example: `with span("wait for rewards"): rewards = await running("judge rollouts", judge(...))`.
    """
    return coroutine if _tracer is None else _tracer.running(name, coroutine)


def served(name: str) -> AbstractContextManager:
    """A context manager for the answer to a request, in a process that other processes send requests: its time is work
    under `name`, and the time since the request before is `wait for a request`."""
    return _UNRECORDED if _tracer is None else _tracer.served(name)

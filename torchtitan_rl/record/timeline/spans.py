"""The spans of one process: OpenTelemetry's, on the clock of the run, with bursts of short ones joined into one."""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Awaitable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from torchtitan_rl.record.timeline.span_file import KIND, THREAD, Leaf, SpanFile
from torchtitan_rl.record.tracing import Kind

__all__ = ["Spans"]

_Result = TypeVar("_Result")
_JOIN_NS = 1_000_000
"""Pieces of work of one name with less than this between them are one span: its gaps are switches of tasks."""


@dataclass(slots=True)
class _Burst:
    """Pieces of work, or overlapping waits, that become one span."""

    start: int
    end: int
    parent: Context
    thread: str
    pieces: int = 1
    open: int = 0
    """Waits that have not ended."""


class _Span:
    """The context manager that `tracing.span` returns in a process that records."""

    __slots__ = ("_spans", "_name", "_kind", "_attributes", "_start", "_begun")

    def __init__(self, spans: Spans, name: str, kind: Kind, attributes: dict[str, int]) -> None:
        self._spans, self._name, self._kind, self._attributes = spans, name, kind, attributes
        self._start = spans.now()
        self._begun: Any = None

    def __enter__(self) -> None:
        if self._kind == "phase":
            self._begun = self._spans.begin(self._name, self._start, self._attributes)
        elif self._kind == "wait" and not self._attributes:
            self._begun = self._spans.wait_begins(self._name, self._start)

    def __exit__(self, *error: object) -> None:
        if self._begun is None:
            self._spans.leaf(self._name, self._kind, self._start, self._spans.now(), attributes=self._attributes)
        elif self._kind == "phase":
            self._spans.end(self._begun)
        else:
            self._spans.wait_ends(self._begun, self._spans.now())


class _Ours(TracerProvider):
    """The tracer provider of a program that has set none itself."""


class Spans:
    """Makes spans and hands them to `file`. Where the program has a tracer provider of its own, they go to whatever
    listens to that, too; where it has none, leaves take the short way to the file, at a tenth of the cost.

    Times are nanoseconds of `time.time_ns()` as the controller read it at the start, carried on by the monotonic clock,
    which all processes of a host share: no adjustment of the wall clock moves spans against each other.
    """

    def __init__(self, file: SpanFile, offset_ns: int, *, serves: bool = False) -> None:
        """`offset_ns`: wall clock minus `time.perf_counter_ns()`. `serves`: the process waits for requests, and is idle
        between two of them."""
        self.offset_ns, self.file, self._serves = offset_ns, file, serves
        self._idle_since = 0
        """When the process answered its last request, where it serves; 0: it is answering one, or has had none."""
        provider = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            provider = _Ours(sampler=ALWAYS_ON, shutdown_on_exit=False)
            trace.set_tracer_provider(provider)
        self._others_listen = not isinstance(provider, _Ours)
        provider.add_span_processor(file)
        self._tracer = provider.get_tracer("torchtitan_rl")
        self._bursts: dict[tuple, _Burst] = {}
        """By name, phase and thread. The `id` of a context stands for its phase; a burst keeps its context alive."""
        self._lock = threading.Lock()

    def now(self) -> int:
        return time.perf_counter_ns() + self.offset_ns

    def span(self, name: str, kind: Kind, attributes: dict[str, int]) -> _Span:
        """See `tracing.span`."""
        return _Span(self, name, kind, attributes)

    async def running(self, name: str, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """See `tracing.running`. Pieces less than a millisecond apart are one span."""
        if not isinstance(coroutine, Coroutine):  # a user's workflow may return another awaitable
            coroutine = _awaited(coroutine)
        return await self._driven(name, coroutine)

    @types.coroutine
    def _driven(self, name: str, coroutine: Coroutine[Any, Any, _Result]):
        """Runs a coroutine as `await` does, and notes when it runs."""
        resume, value = coroutine.send, None
        while True:
            start = self.now()
            try:
                awaited = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self.piece(name, start, self.now())
            try:
                value, resume = (yield awaited), coroutine.send
            except BaseException as error:  # a cancellation too: the coroutine decides what follows
                value, resume = error, coroutine.throw

    @contextmanager
    def served(self, name: str) -> Iterator[None]:
        """See `tracing.served`."""
        start = self.now()
        if self._idle_since:
            self.leaf("wait for a request", "wait", self._idle_since, start)
            self._idle_since = 0
        try:
            yield
        finally:
            end = self.now()
            self.leaf(name, "work", start, end)
            self._idle_since = end if self._serves else 0

    def begin(
        self, name: str, start: int, attributes: Mapping[str, Any] | None = None, *, kind: Kind = "phase"
    ) -> tuple[trace.Span, object]:
        """A span that is the parent of spans of this asyncio task until `end` gets what `begin` returned."""
        known = {KIND: kind, THREAD: threading.current_thread().name, **(attributes or {})}
        span = self._tracer.start_span(name, start_time=start, attributes=known)
        return span, context.attach(trace.set_span_in_context(span))

    def end(self, begun: tuple[trace.Span, Any]) -> None:
        span, token = begun
        context.detach(token)
        span.end(self.now())

    def leaf(
        self,
        name: str,
        kind: Kind,
        start: int,
        end: int,
        *,
        parent: Context | None = None,
        thread: str = "",
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        """A span that has ended."""
        parent = context.get_current() if parent is None else parent
        thread = thread or threading.current_thread().name
        if self._others_listen:
            known = {KIND: kind, THREAD: thread, **(attributes or {})}
            self._tracer.start_span(name, context=parent, start_time=start, attributes=known).end(end)
        else:
            self.file.add(Leaf(name, kind, start, end, thread, parent, attributes))

    def piece(self, name: str, start: int, end: int) -> None:
        """A piece of work, which becomes one span with the pieces of this name just before it."""
        parent = context.get_current()
        key = name, id(parent), threading.get_ident()
        with self._lock:
            burst = self._bursts.get(key)
            if burst is not None and start - burst.end < _JOIN_NS:
                burst.end, burst.pieces = max(burst.end, end), burst.pieces + 1
                return
            self._bursts[key] = _Burst(start, end, parent, threading.current_thread().name)
        if burst is not None:
            self._emit(name, "work", burst)

    def wait_begins(self, name: str, start: int) -> tuple:
        """A wait that becomes one span with the waits of this name, for the same phase, that overlap it. `wait_ends`
        takes what is returned."""
        parent = context.get_current()
        key = name, id(parent), threading.get_ident(), "wait"
        with self._lock:
            burst = self._bursts.get(key)
            if burst is None:
                burst = _Burst(start, start, parent, threading.current_thread().name, pieces=0)
                self._bursts[key] = burst
            burst.open, burst.pieces = burst.open + 1, burst.pieces + 1
        return key

    def wait_ends(self, key: tuple, end: int) -> None:
        with self._lock:
            burst = self._bursts.get(key)
            if burst is None:  # the timeline has been closed meanwhile
                return
            burst.open, burst.end = burst.open - 1, end
            if not burst.open:
                del self._bursts[key]
        if not burst.open:
            self._emit(key[0], "wait", burst)

    def settle(self, *, all: bool = False) -> None:
        """Makes spans of the bursts that have ended; with `all` of waits that go on, too."""
        latest = self.now() - 2 * _JOIN_NS
        with self._lock:
            ended = [key for key, burst in self._bursts.items() if all or (not burst.open and burst.end < latest)]
            bursts = [(key, self._bursts.pop(key)) for key in ended if all or len(key) == 3]
        for key, burst in bursts:
            kind: Kind = "work" if len(key) == 3 else "wait"
            burst.end = self.now() if burst.open else burst.end
            self._emit(key[0], kind, burst)

    def _emit(self, name: str, kind: Kind, burst: _Burst) -> None:
        attributes = {"pieces": burst.pieces} if burst.pieces > 1 else None
        self.leaf(name, kind, burst.start, burst.end, parent=burst.parent, thread=burst.thread, attributes=attributes)


async def _awaited(awaitable: Awaitable[_Result]) -> _Result:
    return await awaitable

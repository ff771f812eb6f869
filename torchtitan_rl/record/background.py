"""A listener of the recorder that cannot fail or delay the run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torchtitan_rl.record.recorder import Event, EventListener, Listener, Span

__all__ = ["BackgroundListener"]

logger = logging.getLogger(__name__)


class BackgroundListener(EventListener):
    """A listener that receives events in a thread of its own, so that nothing it does can fail or delay the run.

    The loop puts events into a queue of at most `room`; a full queue drops the event. The first event that fails is
    reported as a warning, and once that the listener is late: busy with one event for `patience_s`, or behind by `room`
    events. A listener that is not done `patience_s` after the run's end is given up, which is reported too. The thread
    reads an event later than the loop recorded it, and finds a `Span` as the span is then.
    Example: `Recorder([writer, BackgroundListener(partial(TensorBoard, path), "tensorboard", events=(Metrics,))])`.
    """

    def __init__(
        self,
        listener: Listener | Callable[[], Listener],
        name: str,
        *,
        events: Collection[type[Event]] | None = None,
        room: int = 10_000,
        patience_s: float = 10.0,
        beat_s: float | None = None,
        closes_last: bool = False,
    ) -> None:
        """A function as `listener` makes the listener, in the thread. `events` are the kinds of events to pass on,
        without spans; None: all, with spans. After each `beat_s` seconds without an event the listener's `beat` is
        called; None: never. `closes_last`: the listener also gets the events of listeners that close before it, and is
        closed when the recorder waits for it."""
        self._closes_last = closes_last
        self.name, self.room, self.patience_s, self._beat_s = name, room, patience_s, beat_s
        self._kinds = None if events is None else tuple(events)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._reported: set[str] = set()
        self._since: float | None = None
        """When the thread began the event that it is busy with."""
        self._thread = threading.Thread(target=self._receive, args=(listener,), name=f"listener-{name}", daemon=True)
        self._thread.start()

    def event(self, event: Event) -> None:
        if self._kinds is not None and not isinstance(event, self._kinds) or not self._thread.is_alive():
            return
        if self._events.qsize() >= self.room:
            return self._report("late", f"is {self.room} events behind; the next ones are dropped")
        if (since := self._since) is not None and time.monotonic() - since >= self.patience_s:
            self._report("late", f"has been busy with one event for {self.patience_s:g} s; the run does not wait")
        self._events.put(event)

    def begin(self, span: Span) -> None:
        self.event(_Begun(span))

    def advance(self, span: Span, pieces: int, text: str) -> None:
        self.event(_Advanced(span, pieces, text))

    def end(self, span: Span, failed: bool) -> None:
        self.event(_Ended(span, failed))

    def close(self) -> None:
        """Returns at once; `wait` waits for the listener's own `close`."""
        if not self._closes_last:
            self._events.put(_Closed())

    def wait(self) -> None:
        if self._closes_last:
            self._events.put(_Closed())
        closed = time.monotonic()
        while self._thread.is_alive():
            if time.monotonic() - closed >= self.patience_s:
                return self._report("given up", "is still busy at the run's end; it is given up")
            self._thread.join(0.02)

    def _receive(self, listener: Listener | Callable[[], Listener]) -> None:
        self._since = time.monotonic()
        try:
            receiver = listener if isinstance(listener, Listener) else listener()
        except BaseException as error:  # SystemExit would end the thread without a word
            return self._report("failed", f"could not start: {type(error).__name__}: {error}")
        event: Event | None = None
        while not isinstance(event, _Closed):
            self._since = None
            try:
                event = self._events.get(timeout=self._beat_s)
            except queue.Empty:
                event = _Beat()
            self._since = time.monotonic()
            try:
                event.deliver(receiver)
            except BaseException as error:
                self._report("failed", f"{type(error).__name__}: {error}")

    def _report(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            logger.warning("%s: %s; the run goes on, and metrics.jsonl has every number", self.name, text)


# What else the queue holds.


@dataclass(slots=True)
class _Begun:
    span: Span

    def deliver(self, listener: Listener) -> None:
        listener.begin(self.span)


@dataclass(slots=True)
class _Advanced:
    span: Span
    pieces: int
    text: str

    def deliver(self, listener: Listener) -> None:
        listener.advance(self.span, self.pieces, self.text)


@dataclass(slots=True)
class _Ended:
    span: Span
    failed: bool

    def deliver(self, listener: Listener) -> None:
        listener.end(self.span, self.failed)


class _Closed:
    def deliver(self, listener: Listener) -> None:
        listener.close()


class _Beat:
    def deliver(self, listener: Listener) -> None:
        listener.beat()

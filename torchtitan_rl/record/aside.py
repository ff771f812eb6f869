"""A listener of the recorder that cannot fail or delay the run."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from torchtitan_rl.record.recorder import Listener, Span

__all__ = ["Aside"]

logger = logging.getLogger(__name__)


class Aside(Listener):
    """A listener that hears events in a thread of its own, so that nothing it does can fail or delay the run.

    The loop puts events into a queue of at most `room`; a full queue drops the event. The first event that fails is
    reported as a warning, and once that the listener is late: busy with one event for `patience_s`, behind by `room`
    events, or not done `patience_s` after the run's end. Events are read later than they are told: a listener behind an
    `Aside` must not change a `line`, and finds a `Span` as it is then.
    Example: `Recorder([writer, Aside(partial(TensorBoard, path), name="tensorboard", hears=("metrics",))])`.
    """

    def __init__(
        self,
        listener: Listener | Callable[[], Listener],
        name: str,
        *,
        hears: Collection[str] | None = None,
        room: int = 10_000,
        patience_s: float = 10.0,
        beat_s: float | None = None,
    ) -> None:
        """A function as `listener` makes the listener, in the thread. `hears` has the events to pass on: kinds of
        facts, `begin`, `advance`, `end`; None: all. After each `beat_s` seconds without an event the listener's `beat`
        is called; None: never."""
        self.name, self.hears, self.room, self.patience_s, self._beat_s = name, hears, room, patience_s, beat_s
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._reported: set[str] = set()
        self._since: float | None = None
        """When the thread began the event that it is busy with."""
        self._thread = threading.Thread(target=self._hear, args=(listener,), name=f"aside-{name}", daemon=True)
        self._thread.start()

    def fact(self, kind: str, what: dict[str, Any]) -> None:
        self._put(kind, "fact", kind, what)

    def begin(self, span: Span) -> None:
        self._put("begin", "begin", span)

    def advance(self, span: Span, pieces: int, text: str) -> None:
        self._put("advance", "advance", span, pieces, text)

    def end(self, span: Span, failed: bool) -> None:
        self._put("end", "end", span, failed)

    def close(self) -> None:
        """Returns at once; `wait` waits for the listener's own `close`."""
        self._events.put(("close", ()))

    def wait(self) -> None:
        closed = time.monotonic()
        while self._thread.is_alive():
            if time.monotonic() - min(closed, self._since or closed) >= self.patience_s:
                return self._report("late", "is still busy at the run's end; it is given up")
            self._thread.join(0.02)

    def _put(self, event: str, method: str, *arguments: Any) -> None:
        if self.hears is not None and event not in self.hears or not self._thread.is_alive():
            return
        if self._events.qsize() >= self.room:
            return self._report("late", f"is {self.room} events behind; the next ones are dropped")
        if (since := self._since) is not None and time.monotonic() - since >= self.patience_s:
            self._report("late", f"has been busy with one event for {self.patience_s:g} s; the run does not wait")
        self._events.put((method, arguments))

    def _hear(self, listener: Listener | Callable[[], Listener]) -> None:
        method, self._since = "", time.monotonic()
        try:
            heard_by = listener if isinstance(listener, Listener) else listener()
        except BaseException as error:  # SystemExit would end the thread without a word
            return self._report("failed", f"could not start: {type(error).__name__}: {error}")
        while method != "close":
            self._since = None
            try:
                method, arguments = self._events.get(timeout=self._beat_s)
            except queue.Empty:
                method, arguments = "beat", ()
            self._since = time.monotonic()
            try:
                getattr(heard_by, method)(*arguments)
            except BaseException as error:
                self._report("failed", f"{type(error).__name__}: {error}")

    def _report(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            logger.warning("%s: %s; the run goes on, and metrics.jsonl has every number", self.name, text)

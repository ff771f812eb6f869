"""What a run is doing now and what has gone wrong in it: `status.json` and the table `events`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from torchtitan_rl.record.background import BackgroundListener
from torchtitan_rl.record.recorder import (
    DrawEvents,
    EvaluatedAttempts,
    GeneratorStarted,
    Listener,
    Metrics,
    Note,
    Published,
    Recorder,
    RolloutsEnded,
    Span,
    TrainedOn,
    Warned,
)
from torchtitan_rl.record.run_dir import RunDir

__all__ = ["ENDS", "FILE", "HEARTBEAT_S", "Status", "note_end", "watched"]

FILE = "status.json"
ENDS = ("run_failed", "preempted", "interrupted")
"""Kinds of events that end a run before its last act, after its last span perhaps."""
HEARTBEAT_S = 5.0
"""Seconds after which `status.json` is written again although nothing has happened."""
_PERIOD_S = 1.0
_LONGEST_TEXT = 4000
_PACKAGE = "torchtitan_rl"


class Status(Listener):
    """Keeps `status.json` up to date, at most once a second, and appends warnings to the table `events`. Belongs
    behind a `BackgroundListener` with `beat_s`: it writes files.

    Warnings of the kinds `replica_lost`, `replica_replaced`, `replica_joined` and `replica_left` change the health of
    the replica `who`.
    """

    def __init__(self, run_dir: RunDir, replicas: list[str], on_close: Callable[[], None] = lambda: None) -> None:
        """`replicas` are the names of the generator's replicas, such as `generator-0`."""
        self._run_dir, self._on_close = run_dir, on_close
        self._replicas = dict.fromkeys(replicas, "starting")
        self._open: dict[int, tuple[Span, int]] = {}
        """Open spans, outer ones first, with the number of their pieces that are done."""
        self._step = self._num_steps = 0
        self._phase, self._ended, self._stopped, self._failed = "", "", False, False
        self._written, self._changed = 0.0, True
        self._write()

    def metrics(self, event: Metrics) -> None:
        self._mark_changed()

    def trained(self, event: TrainedOn) -> None:
        self._mark_changed()

    def rollouts(self, event: RolloutsEnded) -> None:
        self._mark_changed()

    def evaluated(self, event: EvaluatedAttempts) -> None:
        self._mark_changed()

    def draws(self, event: DrawEvents) -> None:
        self._mark_changed()

    def published(self, event: Published) -> None:
        self._mark_changed()

    def note(self, event: Note) -> None:
        self._mark_changed()

    def generator_started(self, event: GeneratorStarted) -> None:
        self._mark_changed()

    def warned(self, event: Warned) -> None:
        self._run_dir.record("events", self._step, [dataclasses.asdict(event)])
        self._failed |= event.kind in ENDS
        if event.kind == "replica_lost":
            self._replicas[event.who] = event.text
        elif event.kind in ("replica_replaced", "replica_joined"):
            self._replicas[event.who] = "healthy"
        elif event.kind == "replica_left":
            self._replicas.pop(event.who, None)
        self._mark_changed()

    def begin(self, span: Span) -> None:
        if span.total or not (self._num_steps or self._open):
            self._phase, self._num_steps, self._step = span.name, span.total, span.done
        self._open[id(span)] = span, span.done
        self._mark_changed()

    def advance(self, span: Span, pieces: int, text: str) -> None:
        if id(span) in self._open:
            self._open[id(span)] = span, self._open[id(span)][1] + pieces
            if span.name == self._phase:
                self._step = self._open[id(span)][1]
        self._mark_changed()

    def end(self, span: Span, failed: bool) -> None:
        self._open.pop(id(span), None)
        self._stopped = failed
        if not failed:  # the first span that ends is the start
            self._replicas = {name: "healthy" if how == "starting" else how for name, how in self._replicas.items()}
        self._mark_changed()

    def beat(self) -> None:
        if self._changed or time.monotonic() - self._written >= HEARTBEAT_S:
            self._write()

    def close(self) -> None:
        self._on_close()
        self._ended = "stopped" if self._stopped or self._failed or self._open else "finished"
        self._write()

    def _mark_changed(self) -> None:
        self._changed = True
        if time.monotonic() - self._written >= _PERIOD_S:
            self._write()

    def _write(self) -> None:
        file = self._run_dir.path / FILE
        beside = file.with_name(f"{FILE}.writing")
        beside.write_text(json.dumps(self._now(), indent=1) + "\n", encoding="utf-8")
        os.replace(beside, file)
        self._written, self._changed = time.monotonic(), False

    def _now(self) -> dict[str, Any]:
        return {
            "at": _iso(0.0),
            "heartbeat_s": HEARTBEAT_S,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "attempt": self._run_dir.attempt,
            "phase": self._phase,
            "step": self._step,
            "num_steps": self._num_steps,
            "ended": self._ended,
            "spans": [
                {"name": span.name, "since": _iso(time.perf_counter() - span.began), "done": done, "total": span.total}
                for span, done in self._open.values()
            ],
            "replicas": self._replicas,
        }


class _Events(logging.Handler):
    """Passes the warnings and errors of this package on to a listener."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.listener: Listener | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.listener is not None:
            event = Warned(
                at=datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
                level=record.levelname.lower(),
                kind=getattr(record, "event", record.levelname.lower()),
                who=getattr(record, "who", ""),
                text=record.getMessage()[:_LONGEST_TEXT],
            )
            self.listener.warned(event)


_EVENTS = _Events()
"""The one handler of this process; it tells the run that began last."""


def watched(run_dir: RunDir, replicas: list[str]) -> BackgroundListener:
    """A listener in a thread of its own that keeps a run's `status.json` and its table `events`, to which each warning
    and error that this package logs in this process is added until the run has ended. The last listener of a recorder.

    A log record may say what happened and to whom: `logger.warning(text, extra={"event": "replica_lost", "who":
    "generator-1"})`.
    """
    status = Status(run_dir, replicas, lambda: _forget(background))
    background = BackgroundListener(status, "status", beat_s=_PERIOD_S, closes_last=True)
    _EVENTS.listener = background
    logging.getLogger(_PACKAGE).addHandler(_EVENTS)  # a second call adds nothing
    return background


def note_end(recorder: Recorder, kind: str, text: str) -> None:
    """Tells the recorder why a run ends before its last step: `run_failed`, `preempted` or `interrupted`."""
    recorder.record(Warned(at=_iso(0.0), level="error", kind=kind, who="", text=text[:_LONGEST_TEXT]))


def _forget(listener: Listener) -> None:
    if _EVENTS.listener is listener:
        _EVENTS.listener = None
        logging.getLogger(_PACKAGE).removeHandler(_EVENTS)


def _iso(seconds_ago: float) -> str:
    return (datetime.now().astimezone() - timedelta(seconds=seconds_ago)).isoformat(timespec="milliseconds")

"""Progress of a run as JSON, for `--json-logs`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from torchtitan_rl.record.console.notices import as_object
from torchtitan_rl.record.console.progress import Bar

__all__ = ["JsonProgress"]


class JsonProgress:
    """In the place of `progress.Progress`, without bars. Events: `begin` and `end` of a phase or wait, `metrics` with
    all numbers of a line, `note`, and `summary` at the run's end. `quiet` prints nothing except `summary`."""

    def __init__(self, *, quiet: bool = False, file: TextIO | None = None) -> None:
        self._quiet, self._file = quiet, file or sys.stdout

    def phase(self, name: str, total: int, done: int = 0):
        """A context manager around `total` equal pieces of work, `done` of them earlier. Yields a Bar, which prints
        nothing."""
        return self._bar(name, total, {"name": name, "total": total} | ({"done": done} if done else {}))

    def waiting(self, name: str, expected_s: float | None = None):
        """A context manager around work without pieces."""
        return self._bar(name, expected_s or 0, {"name": name})

    def metrics(self, line: dict[str, Any], text: str) -> None:
        self._write("metrics", line)

    def line(self, text: str) -> None:
        self._write("note", {"message": text})

    def final_table(self, rows: list[tuple[str, str]]) -> None:
        """Prints (label, value) rows, quiet or not."""
        self._print(as_object("summary", "info", dict(rows)))

    @contextmanager
    def _bar(self, name: str, total: float, began: dict[str, Any]) -> Iterator[Bar]:
        bar = Bar(name, total, time.monotonic, lambda bar: None)
        self._write("begin", began)
        outcome = "stopped"
        try:
            yield bar
            outcome = "done"
        finally:
            self._write("end", {"name": name, "outcome": outcome, "seconds": round(bar.elapsed_s, 3)})

    def _write(self, event: str, fields: dict[str, Any]) -> None:
        if not self._quiet:
            self._print(as_object(event, "info", fields))

    def _print(self, text: str) -> None:
        try:
            print(text, file=self._file, flush=True)
        except BrokenPipeError:  # whoever read it has enough
            self._file = open(os.devnull, "w")

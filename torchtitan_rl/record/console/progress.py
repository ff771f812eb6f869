"""The progress display of a run: bars with time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.progress import Progress as RichProgress
from rich.progress import ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from torchtitan_rl.record.console.step_numbers import LiveTable

__all__ = ["Progress", "Bar"]

_PLAIN_EVERY_S = 5.0
_PLAIN_WIDTH = 200


class Bar:
    """The bar of one phase: pieces done, elapsed time, and a short text with current numbers."""

    def __init__(
        self,
        name: str,
        total: float,
        clock: Callable[[], float],
        changed: Callable[[Bar], None],
        counts: bool = True,
        done: int = 0,
    ) -> None:
        """`done`: pieces that were done before, which say nothing of the pace."""
        self.name, self.total, self.counts, self.text = name, total, counts, ""
        self.num_done, self.done_before = done, done
        self._clock, self._changed = clock, changed
        self._start = self._last = clock()

    def advance(self, num: int = 1, text: str | None = None) -> None:
        """`num` more pieces are done; `text` replaces the current numbers."""
        self.num_done += num
        self._last = self._clock()
        self.update(self.text if text is None else text)

    def update(self, text: str) -> None:
        """Replaces the current numbers."""
        self.text = text
        self._changed(self)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._start

    @property
    def left_s(self) -> float | None:
        """Seconds left, more than 0, by the pace so far or by the expected time; None when neither is known: before the
        first piece, when the last one takes longer than its peers, and when a wait is longer than expected."""
        if not self.counts:
            left_s = self.total - self.elapsed_s
        elif self.num_done > self.done_before:
            pace_s = (self._last - self._start) / (self.num_done - self.done_before)
            piece_left_s = max(0.0, pace_s - (self._clock() - self._last))
            left_s = piece_left_s + pace_s * (self.total - self.num_done - 1)
        else:
            return None
        return left_s if left_s > 0 else None

    @property
    def fraction(self) -> float | None:
        done = self.num_done if self.counts else self.elapsed_s
        return min(1.0, done / self.total) if self.total else None

    @property
    def count(self) -> str:
        return f"{self.num_done}/{self.total}" if self.counts else ""


class Progress:
    """Progress of a run on `file` (stdout unless given).

    On a terminal: a bar per phase, replaced by one line when the phase ends, and above the bars the latest numbers.
    Elsewhere: a line at most every 5 s and one at the end of a phase, without control codes. `quiet` prints nothing
    except the final table. Where the reader of a pipe has gone, nothing more is printed.

    Example::

        with progress.phase("supervised", total=450) as bar:
            bar.advance(text="loss 0.12")
    """

    def __init__(
        self, *, quiet: bool = False, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        file = file or sys.stdout
        # rich would take FORCE_COLOR for a terminal and write control codes into a log.
        self._plain = not file.isatty() or Console(file=file).is_dumb_terminal
        self._console = (
            _Console(file=file, force_terminal=False, color_system=None, width=_PLAIN_WIDTH)
            if self._plain
            else _Console(file=file)
        )
        self._quiet, self._clock = quiet, clock
        self._last_plain = clock()
        self._rich: _Live | None = None
        self._table = LiveTable()
        self._open: list[tuple[Bar, TaskID | None]] = []

    def phase(self, name: str, total: int, done: int = 0):
        """A context manager around `total` equal pieces of work, `done` of them earlier. Yields a Bar; call `advance`
        after each piece."""
        return self._bar(name, total, counts=True, done=done)

    def waiting(self, name: str, expected_s: float | None = None):
        """A context manager around work without pieces. With `expected_s` the bar shows the time left."""
        return self._bar(name, expected_s or 0, counts=False)

    def metrics(self, line: dict[str, Any], text: str) -> None:
        """Prints a line of metrics in words, if any, and shows its numbers on a terminal."""
        if not self._plain:
            self._table.add(line)
        if text:
            self.line(text)

    def line(self, text: str) -> None:
        """Prints a line, above the bars."""
        if not self._quiet:
            self._print(text)

    def final_table(self, rows: list[tuple[str, str]]) -> None:
        """Prints (label, value) rows, quiet or not."""
        table = Table(show_header=False, box=box.ROUNDED)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for label, value in rows:
            table.add_row(Text(label), Text(value))
        self._console.print(table)

    @contextmanager
    def _bar(self, name: str, total: float, counts: bool, done: int = 0) -> Iterator[Bar]:
        bar = Bar(name, total, self._clock, self._changed, counts, done)
        if self._quiet:
            yield bar
            return
        if self._plain and not counts and not self._open:
            self._print(f"{name}: about {total:.0f} s" if total else f"{name} ...")
        self._open.append((bar, self._show(bar)))
        outcome = "stopped"
        try:
            yield bar
            outcome = "done"
        finally:
            self._hide(bar)
            # An inner phase, such as an evaluation between steps, leaves no line behind unless it failed.
            if not self._open or outcome == "stopped":
                self._print(_summary(bar, outcome))

    def _show(self, bar: Bar) -> TaskID | None:
        if self._plain:
            return None
        if self._rich is None:
            self._rich = _Live(
                self._table,
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                _BarColumn(),
                _CountColumn(),
                _TimeColumn(),
                _TextColumn(table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
                console=self._console,
                transient=True,
                expand=True,
            )
            self._rich.start()
        return self._rich.add_task(bar.name, total=None, bar=bar)

    def _hide(self, bar: Bar) -> None:
        task = next(task for other, task in self._open if other is bar)
        self._open = [(other, task) for other, task in self._open if other is not bar]
        if self._rich is not None:
            self._rich.remove_task(task)
            if not self._open:
                self._rich.stop()
                self._rich = None

    def _changed(self, bar: Bar) -> None:
        if self._quiet or not self._plain or self._clock() - self._last_plain < _PLAIN_EVERY_S:
            return
        if bar.counts and bar.num_done >= bar.total:
            return  # the line at the end of the phase follows at once
        self._last_plain = self._clock()
        self._print(", ".join(filter(None, [f"{bar.name} {bar.count}".rstrip(), _times(bar), bar.text])))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class _Live(RichProgress):
    """The bars, under a table of the latest numbers."""

    def __init__(self, numbers: LiveTable, *columns: ProgressColumn, **options: Any) -> None:
        self._numbers = numbers
        super().__init__(*columns, **options)

    def get_renderables(self) -> Iterator[RenderableType]:
        if self._numbers:
            yield self._numbers
        yield from super().get_renderables()


class _Console(Console):
    """A console whose reader may go: `torchtitan-rl train ... | head`."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class _BarColumn(ProgressColumn):
    def render(self, task: Task) -> ProgressBar:
        bar: Bar = task.fields["bar"]
        fraction = bar.fraction
        return ProgressBar(
            total=None if fraction is None else 1.0,
            completed=fraction or 0.0,
            width=24,
            pulse=fraction is None,
            animation_time=task.get_time(),
        )


class _CountColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["bar"].count)


class _TimeColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_times(task.fields["bar"]), no_wrap=True)


class _TextColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(task.fields["bar"].text, no_wrap=True, overflow="ellipsis")


def _times(bar: Bar) -> str:
    """`1:05, 0:40 left`: minutes and seconds."""
    left_s = bar.left_s
    return _minutes(bar.elapsed_s) + ("" if left_s is None else f", {_minutes(max(1.0, left_s))} left")


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _summary(bar: Bar, outcome: str) -> str:
    """`supervised: 450/450 done in 41.2 s, loss 0.12`; of a phase that goes on `450/450 (from 200) done in ...`."""
    after = "in" if outcome == "done" else "after"
    count = f"{bar.count} (from {bar.done_before})" if bar.done_before else bar.count
    head = f"{bar.name}: {count} {outcome} {after} {bar.elapsed_s:.1f} s".replace(":  ", ": ")
    return f"{head}, {bar.text}" if bar.text else head

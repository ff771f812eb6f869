"""The numbers of a step on the console: as a line, and on a terminal as a small table under the bars."""

from __future__ import annotations

from collections import deque
from statistics import fmean
from typing import Any, NamedTuple

from rich.table import Table

from torchtitan_rl.metrics import PHASES

__all__ = ["LiveTable", "step_line"]

_RECENT = 10


class _Column(NamedTuple):
    title: str
    metric: str
    form: str
    in_line: bool = True
    """Whether the line of a batch has it too; the table has every column."""


_COLUMNS = (
    _Column("loss", "loss/mean", ".3f", in_line=False),
    _Column("reward", "reward/mean", ".3f"),
    _Column("no signal", "reward/zero_std_frac", ".0%"),
    _Column("accuracy", "eval/accuracy", ".3f", in_line=False),
    _Column("entropy", "policy/entropy", ".3f"),
    _Column("clipped", "policy/clip_frac", ".1%", in_line=False),
    _Column("length", "completion/length_mean", ".1f"),
    _Column("grad", "optim/grad_norm", ".2f"),
    _Column("kl", "mismatch/kl", ".1e"),
    _Column("s/step", "time/step_s", ".2f", in_line=False),
)


def step_line(line: dict[str, Any], num_steps: int) -> str:
    """The metrics of a batch as one line of text."""
    numbers = (f"{title} {line[metric]:{form}}  " for title, metric, form, in_line in _COLUMNS if in_line)
    return f"step {line['step']:>4}/{num_steps}  {''.join(numbers)}{line['time/step_s']:.2f} s"


class LiveTable:
    """Per metric the first number of the phase, the mean of the last ten, and the latest. Evaluations count on the set
    and split of the first one."""

    def __init__(self) -> None:
        self._phase = ""
        self._first: dict[str, float] = {}
        self._recent: dict[str, deque[float]] = {}
        self._evaluated: tuple[Any, Any] | None = None

    def add(self, line: dict[str, Any]) -> None:
        """Takes the numbers of a line of metrics."""
        if line["phase"] == "evaluation":
            evaluated = line.get("eval/name"), line.get("eval/split")
            self._evaluated = self._evaluated or evaluated
            names = ["eval/accuracy"] if evaluated == self._evaluated else []
        elif line["phase"] in PHASES:
            if line["phase"] != self._phase:
                self._phase, accuracy = line["phase"], self._recent.get("eval/accuracy")
                self._first = {name: value for name, value in self._first.items() if name == "eval/accuracy"}
                self._recent = {} if accuracy is None else {"eval/accuracy": accuracy}
            names = [column.metric for column in _COLUMNS if not column.metric.startswith("eval/")]
        else:
            return
        for name in names:
            if isinstance(value := line.get(name), (int, float)):
                self._first.setdefault(name, value)
                self._recent.setdefault(name, deque(maxlen=_RECENT)).append(value)

    def __bool__(self) -> bool:
        return bool(self._recent)

    def __rich__(self) -> Table:
        hidden = "loss/mean" if "reward/mean" in self._recent else ""  # a surrogate's value says little
        columns = [column for column in _COLUMNS if column.metric in self._recent and column.metric != hidden]
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("")
        for column in columns:
            table.add_column(column.title, justify="right", no_wrap=True)
        for row, value in (
            ("first", lambda name: self._first[name]),
            (f"last {_RECENT}", lambda name: fmean(self._recent[name])),
            ("now", lambda name: self._recent[name][-1]),
        ):
            table.add_row(row, *(format(value(column.metric), column.form) for column in columns))
        return table

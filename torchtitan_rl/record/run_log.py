"""The files of a run that grow: JSON lines of metrics, and of records of rollouts, evaluations, draws and
policy versions."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from torchtitan_rl.record.recorder import DrawEvents, Evaluated, Listener, Metrics, Published, RolloutsEnded, TrainedOn
from torchtitan_rl.record.records import Trained, rollout_records
from torchtitan_rl.record.tracing import span

__all__ = ["RunLog", "RunDirWriter", "Tail", "encode", "json_line"]

_METRIC_NAME = re.compile(r"step|phase|[a-z][a-z0-9_]*/[a-z][a-z0-9_@]*")


class Tail:
    """The part of a table that grows (see `record.tables`): appends records, with the names in `columns`, to the
    newest of the numbered files in `directory`."""

    def __init__(self, directory: Path, columns: Sequence[str]) -> None:
        self.directory, self._columns = directory, dict.fromkeys(columns)
        self._number = 0
        """The part that this process appends to; 0 before its first record."""

    def append(self, records: Iterable[dict[str, Any]], *, durable: bool = False) -> None:
        """Adds records: all, or none if one is refused. On return the operating system has them, and with `durable` the
        disk. Raises ValueError for a column that the schema lacks."""
        lines = []
        for record in records:
            if unknown := sorted(record.keys() - self._columns.keys()):
                raise ValueError(
                    f"table={self.directory.name}: has no column {', '.join(unknown)}; its columns are "
                    f"{', '.join(self._columns)}"
                )
            lines.append(json_line(record))
        self._number = self._number or self._begin()
        with open(self._lines(self._number), "ab") as stream:
            stream.write(b"".join(lines))
            if durable:
                stream.flush()
                os.fsync(stream.fileno())

    def rotate(self) -> None:
        """Lets the next record begin a new part."""
        if self._number and self._lines(self._number).exists():
            self._number += 1

    def _lines(self, number: int) -> Path:
        return self.directory / f"{number:06d}.jsonl"

    def _parts(self) -> set[int]:
        files = self.directory.iterdir() if self.directory.exists() else ()
        return {int(file.stem) for file in files if file.suffix in (".jsonl", ".parquet") and file.stem.isdecimal()}

    def _begin(self) -> int:
        """Makes the directory; the number of this process's first part."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return max(self._parts(), default=0) + 1


class RunLog:
    """The files of a run that grow: `metrics.jsonl`, and the tables of `record.schemas`."""

    def __init__(self, path: Path, tables: Mapping[str, Tail]) -> None:
        self.path, self.tables = path, tables
        self.metrics_file = path / "metrics.jsonl"
        self.attempt = 1
        """The number of this attempt at the run, which every record names."""

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl. On return the operating system has the line. Floats keep every bit.

        Example: `log_metrics({"step": 3, "phase": "reinforcement", "reward/mean": 0.25})`.
        Raises ValueError for a missing step or phase, a name that is not `area/what`, or a value that is not plain.
        """
        for name in ("step", "phase"):
            if name not in metrics:
                raise ValueError(f"metrics={sorted(metrics)}: has no {name!r}; every line names its step and phase")
        for name, value in metrics.items():
            if not _METRIC_NAME.fullmatch(name):
                raise ValueError(f"metric={name!r}: is not of the form area/what; rename it, as in 'reward/mean'")
            if not isinstance(value, (int, float, str)):
                raise ValueError(
                    f"{name}={value!r}: is a {type(value).__name__}; give a Python number or text, .item() of a tensor"
                )
        with span("write records"), self.metrics_file.open("ab") as stream:
            stream.write(json_line(metrics))

    def record(self, table: str, step: int, records: Iterable[dict[str, Any]], *, durable: bool = False) -> None:
        """Appends records to a table of `record.schemas`; each names the step and this attempt."""
        told = ({"step": step, "attempt": self.attempt, **record} for record in records)
        with span("write records"):
            self.tables[table].append(told, durable=durable)


class RunDirWriter(Listener):
    """Writes events to a run's directory: metrics, rollouts, evaluations, draws and policy versions."""

    def __init__(self, log: RunLog, decode: Callable[[list[int]], str] | None = None) -> None:
        """`decode` turns tokens into text; with None, rollouts are recorded without what is per turn or token."""
        self._log, self._decode = log, decode
        self._trained: Sequence[Trained] = []

    def metrics(self, event: Metrics) -> None:
        self._log.log_metrics(event.line)

    def draws(self, event: DrawEvents) -> None:
        self._log.record("ledger", event.step, event.records)

    def evaluated(self, event: Evaluated) -> None:
        self._log.record("evaluations", event.step, event.records)

    def published(self, event: Published) -> None:
        at = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._log.record("versions", event.step, [{"version": event.version, "seconds": event.seconds, "at": at}])

    def trained(self, event: TrainedOn) -> None:
        if self._decode is not None:
            self._trained = event.sequences

    def rollouts(self, event: RolloutsEnded) -> None:
        records = rollout_records(event.groups, self._trained, self._decode)
        self._log.record("rollouts", event.step, ({"phase": "reinforcement", **record} for record in records))
        self._trained = []


def json_line(record: Mapping[str, Any]) -> bytes:
    try:  # in a fifth of the time that json takes
        return to_json(record, inf_nan_mode="strings") + b"\n"
    except PydanticSerializationError:  # what no JSON holds, or a lone surrogate: UTF-8 lacks it, JSON has an escape
        return (json.dumps(encode(record), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def encode(value: Any) -> Any:
    """A value as JSON has it: NaN and the infinities become text that `float()` parses."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value

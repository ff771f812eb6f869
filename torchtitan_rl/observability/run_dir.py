"""A run's directory: plain files that any program can read.

config.json            what ran
metrics.jsonl          one line per step or evaluation
logs/                  one file per process
rollouts/              a table with one record per rollout; see `observability.tables` and `observability.records`
ledger/                a table with two records per draw: admitted, and how it ended; see `run.ledger`
versions/              a table with one record per publication of the policy's weights
attempts/              a table with one record per start of the run; see `observability.attempts`
checkpoints/step-N     resumable state after N steps; see `weights.checkpoint`
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.recorder import Listener
from torchtitan_rl.observability.records import SCHEMAS, Trained, rollout_records
from torchtitan_rl.observability.tables import Table, encode

__all__ = ["RunDir", "RunDirWriter"]

_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_@]*")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class RunDir:
    """The files of one run below `path`. `RunDir.create` starts a new run; `RunDir(path)` opens an existing run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.tables = {name: Table(self.path / name, schema) for name, schema in SCHEMAS.items()}
        self.attempt = 1
        """The number of this attempt at the run, which every record names."""

    @classmethod
    def create(cls, path: str | Path) -> RunDir:
        """Makes the directories of a new run. Raises ValueError when `path` cannot be written or already holds a
        run."""
        run_dir = cls(path)
        try:
            for directory in (run_dir.path, run_dir.logs, run_dir.checkpoints):
                directory.mkdir(parents=True, exist_ok=True)
                # Write a file: permissions do not show that a file system is read-only or full.
                probe = directory / ".probe"
                probe.write_text("probe")
                probe.unlink()
            run_dir.metrics_file.touch()
            used = run_dir.metrics_file.stat().st_size > 0
        except OSError as error:
            raise ValueError(
                f"output_dir={str(path)!r}: cannot be written ({error.strerror}: {error.filename}); choose a directory "
                "you may write to"
            ) from error
        if used:
            raise ValueError(
                f"output_dir={str(path)!r}: already holds a run (its metrics.jsonl has lines); pick another output_dir"
            )
        return run_dir

    def checkpoint_path(self, step: int) -> Path:
        """The path of the checkpoint after `step` steps. Makes no directory."""
        return self.checkpoints / f"step-{step}"

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes config.json. `config` is plain data, such as `config.resolve.resolved` returns."""
        self.config_file.write_text(json.dumps(encode(config), indent=2) + "\n", encoding="utf-8")

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl. On return the operating system has the line. Floats keep every bit.

        Example: `log_metrics({"step": 3, "phase": "reinforcement", "reward/mean": 0.25})`.
        Raises ValueError for a missing step or phase, a name that is not `area/what`, or a value that is not plain.
        """
        for name in ("step", "phase"):
            if name not in metrics:
                raise ValueError(f"metrics={sorted(metrics)}: has no {name!r}; every line names its step and phase")
        for name, value in metrics.items():
            if name not in ("step", "phase") and not _METRIC_NAME.fullmatch(name):
                raise ValueError(f"metric={name!r}: is not of the form area/what; rename it, as in 'reward/mean'")
            if not isinstance(value, (int, float, str)):
                raise ValueError(
                    f"{name}={value!r}: is a {type(value).__name__}; give a Python number or text, .item() of a tensor"
                )
        with self.metrics_file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(json.dumps(encode(metrics), ensure_ascii=False) + "\n")

    def metrics_size(self) -> int:
        """Bytes of metrics.jsonl, all of them on disk."""
        with self.metrics_file.open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every complete line, in order; [] before the first line. A last line that a crash cut off is left out.

        Raises RuntimeError when a line is not JSON.
        """
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            return [_decode(json.loads(line)) for line in lines if line]
        except json.JSONDecodeError as error:
            raise RuntimeError(
                f"{self.metrics_file}: holds a line that is not JSON ({error}): {error.doc[:80]!r}; remove that line"
            ) from error

    def record(self, table: str, step: int, records: list[dict[str, Any]], *, durable: bool = False) -> None:
        """Appends records to a table of `observability.records`; each names the step and this attempt."""
        self.tables[table].append(
            [{"step": step, "attempt": self.attempt, **record} for record in records], durable=durable
        )


class RunDirWriter(Listener):
    """Writes what the loop tells to a run's directory: metrics, rollouts, draws and policy versions."""

    def __init__(self, run_dir: RunDir, decode: Callable[[list[int]], str] | None = None) -> None:
        """`decode` turns tokens into text; with None, rollouts are recorded without what is per turn or token."""
        self.run_dir, self._decode = run_dir, decode
        self._trained: list[Trained] = []

    def fact(self, kind: str, what: dict[str, Any]) -> None:
        if kind == "metrics":
            self.run_dir.log_metrics(what["line"])
        elif kind == "draws":
            self.run_dir.record("ledger", what["step"], what["records"])
        elif kind == "version":
            now = datetime.now().astimezone().isoformat(timespec="milliseconds")
            record = {"version": what["version"], "at": now, "seconds": what["seconds"]}
            self.run_dir.record("versions", what["step"], [record])
        elif kind == "trained" and self._decode is not None:
            self._trained = what["sequences"]
        elif kind == "rollouts":
            records = rollout_records(what["groups"], self._trained, self._decode)
            self.run_dir.record("rollouts", what["step"], [{"phase": "reinforcement", **record} for record in records])
            self._trained = []


def _decode(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in _NOT_FINITE else value for name, value in metrics.items()}

"""A run's directory: plain files that any program can read.

config.json            what ran
metrics.jsonl          one line per step or evaluation
logs/                  one file per process
rollouts/              a table with one record per rollout; see `record.tables` and `record.schemas`
evaluations/           a table with one record per attempt at a task of an evaluation
ledger/                a table with two records per draw: admitted, and how it ended; see `rollout.draws`
versions/              a table with one record per publication of the policy's weights
attempts/              a table with one record per start of the run; see `record.attempts`
events/                a table with one record per warning of the controller; see `record.status`
samples/               a table with one record per process and replica every few seconds; see `health.samples`
schedule/attempt-N/    what the engines of an attempt executed when; see `record.schedule`
checksums.jsonl        checksums of finished files; see `record.checksums`
status.json            what the run is doing now; see `record.status`
checkpoints/step-N     resumable state after N steps; see `weights.checkpoint`
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchtitan_rl.metrics import is_metric
from torchtitan_rl.record.checksums import Checksums
from torchtitan_rl.record.json_lines import append_lines, encode, json_line, parsed, replace_text
from torchtitan_rl.record.schemas import SCHEMAS
from torchtitan_rl.record.tables import Table
from torchtitan_rl.record.tracing import span

__all__ = ["RunDir", "require_unused"]

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def require_unused(path: Path) -> None:
    """Raises ValueError for a directory that holds a run already."""
    metrics_file = path / "metrics.jsonl"
    if metrics_file.exists() and metrics_file.stat().st_size > 0:
        raise ValueError(
            f"output_dir={str(path)!r}: already holds a run (its metrics.jsonl has lines); pick another "
            "output_dir, or go on with that run: torchtitan-rl train CONFIG --resume auto --output-dir "
            f"{shlex.quote(str(path))}"
        )


class RunDir:
    """The files of one run below `path`. `RunDir.create` starts a new run; `RunDir(path)` opens an existing run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tables = {name: Table(self.path / name, schema) for name, schema in SCHEMAS.items()}
        self.metrics_file = self.path / "metrics.jsonl"
        self.attempt = 1
        """The number of this attempt at the run, which every record names."""
        self.config_file = self.path / "config.json"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.checksums = Checksums(self.path)

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
        except OSError as error:
            raise ValueError(
                f"output_dir={str(path)!r}: cannot be written ({error.strerror}: {error.filename}); choose a directory "
                "you may write to"
            ) from error
        require_unused(run_dir.path)
        return run_dir

    def checkpoint_path(self, step: int) -> Path:
        """The path of the checkpoint after `step` steps. Makes no directory."""
        return self.checkpoints / f"step-{step}"

    def write_config(self, config: dict[str, Any]) -> None:
        """Writes config.json. `config` is plain data, such as `config.resolve.resolved` returns."""
        replace_text(self.config_file, json.dumps(encode(config), indent=2) + "\n")
        self.checksums.replace(self.config_file)

    def log_metrics(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl. On return the operating system has the line. Floats keep every bit.

        Example: `log_metrics({"step": 3, "phase": "reinforcement", "reward/mean": 0.25})`.
        Raises ValueError for a missing step or phase, a name that is not `area/what`, or a value that is not plain.
        """
        for name in ("step", "phase"):
            if name not in metrics:
                raise ValueError(f"metrics={sorted(metrics)}: has no {name!r}; every line names its step and phase")
        for name, value in metrics.items():
            if name not in ("step", "phase") and not is_metric(name):
                raise ValueError(f"metric={name!r}: is not of the form area/what; rename it, as in 'reward/mean'")
            if not isinstance(value, (int, float, str)):
                raise ValueError(
                    f"{name}={value!r}: is a {type(value).__name__}; give a Python number or text, .item() of a tensor"
                )
        with span("write records"):
            append_lines(self.metrics_file, json_line(metrics))

    def record(self, table: str, step: int, records: Iterable[dict[str, Any]], *, durable: bool = False) -> None:
        """Appends records to a table of `record.schemas`; each names the step and this attempt."""
        rows = ({"step": step, "attempt": self.attempt, **record} for record in records)
        with span("write records"):
            self.tables[table].append(rows, durable=durable)

    def note_checksums(self, metrics_bytes: int | None = None) -> None:
        """Notes the checksums of what is on disk now of metrics, tables and schedules, of metrics.jsonl the first
        `metrics_bytes` (None: all)."""
        if self.metrics_file.exists():
            self.checksums.note(self.metrics_file, size=metrics_bytes)
        for table in self.tables.values():
            self.checksums.note(*table.files())
        self.checksums.note(*sorted(self.path.glob("schedule/*/*.json*")))

    def metrics_size(self) -> int:
        """Bytes of metrics.jsonl, all of them on disk."""
        with self.metrics_file.open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size

    def read_metrics(self) -> list[dict[str, Any]]:
        """Every complete line, in order; [] before the first line. A last line that a crash cut off is left out.

        Raises RuntimeError when a line is not JSON, or not UTF-8.
        """
        if not self.metrics_file.exists():
            return []
        lines = self.metrics_file.read_bytes().split(b"\n")[:-1]
        metrics = []
        for number, line in enumerate(lines, 1):
            try:
                metrics += [_decode(parsed(line))] if line else []
            except ValueError as error:
                shown = line.decode(errors="replace")[:80]
                raise RuntimeError(
                    f"{self.metrics_file}, line {number}: holds a line that is not JSON ({error}): {shown!r}; remove "
                    "that line"
                ) from error
        return metrics


def _decode(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in _NOT_FINITE else value for name, value in metrics.items()}

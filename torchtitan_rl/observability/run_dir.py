"""A run's directory: plain files that any program can read.

config.json            what ran
metrics.jsonl          one line per step or evaluation
logs/                  one file per process
ledger.jsonl           two lines per draw: admitted, and how it ended; see `run.ledger`
rollouts/              step-NNNNNN.jsonl, one line per rollout
checkpoints/step-N     resumable state after N steps; see `weights.checkpoint`
attempts.jsonl         one line per start of the run; see `observability.attempts`
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.observability.recorder import Listener

if TYPE_CHECKING:
    from torchtitan_rl.types import Rollout, RolloutGroup

__all__ = ["RunDir", "JsonLines"]

_METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*/[a-z][a-z0-9_@]*")
_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class RunDir:
    """The files of one run below `path`. `RunDir.create` starts a new run; `RunDir(path)` opens an existing run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "config.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.ledger_file = self.path / "ledger.jsonl"
        self.logs = self.path / "logs"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"
        self.attempt = 1
        """The number of this attempt at the run, which every rollout's record names."""

    @classmethod
    def create(cls, path: str | Path) -> RunDir:
        """Makes the directories of a new run. Raises ValueError when `path` cannot be written or already holds a
        run."""
        run_dir = cls(path)
        try:
            for directory in (run_dir.path, run_dir.logs, run_dir.rollouts, run_dir.checkpoints):
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
        self.config_file.write_text(json.dumps(_encode(config), indent=2) + "\n", encoding="utf-8")

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
        _append(self.metrics_file, [metrics])

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

    def log_draws(self, step: int, records: list[dict[str, Any]]) -> None:
        """Appends one line per record of `run.ledger` to ledger.jsonl."""
        _append(self.ledger_file, [{"step": step, "attempt": self.attempt, **record} for record in records])

    def log_rollouts(self, step: int, phase: str, groups: list[RolloutGroup]) -> None:
        """Appends one line per rollout to `rollouts/step-NNNNNN.jsonl`."""
        _append(
            self.rollouts / f"step-{step:06d}.jsonl",
            [
                {
                    "step": step,
                    "attempt": self.attempt,
                    "phase": phase,
                    "group_id": group.id,
                    **_rollout_record(rollout),
                    "advantage": None if group.advantages is None else group.advantages[index],
                }
                for group in groups
                for index, rollout in enumerate(group.rollouts)
            ],
        )


class JsonLines(Listener):
    """Writes metrics, draws and rollouts to a run's directory: one line per step or evaluation, two per draw, one per
    rollout."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir

    def fact(self, kind: str, what: dict[str, Any]) -> None:
        if kind == "metrics":
            self.run_dir.log_metrics(what["line"])
        elif kind == "draws":
            self.run_dir.log_draws(what["step"], what["records"])
        elif kind == "rollouts":
            self.run_dir.log_rollouts(what["step"], "reinforcement", what["groups"])


def _rollout_record(rollout: Rollout) -> dict[str, Any]:
    completions = [turn.completion for turn in rollout.turns]
    versions = [version for completion in completions for version in completion.policy_versions]
    return {
        "rollout_id": rollout.id,
        "draw": rollout.group,
        "task_id": rollout.task.id,
        "prompt": rollout.task.prompt,
        "text": rollout.text,
        **({"end_reason": rollout.end_reason} if rollout.end_reason else {}),
        "reward": rollout.reward,
        "num_tokens": [len(completion.tokens) for completion in completions],  # per turn
        "finish_reason": completions[-1].finish_reason if completions else None,
        "policy_version_min": min(versions, default=None),
        "policy_version_max": max(versions, default=None),
    }


def _append(file: Path, records: list[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(_encode(record), ensure_ascii=False) + "\n" for record in records)
    # A lone surrogate cannot be UTF-8, but its backslash form is a valid JSON escape.
    with file.open("a", encoding="utf-8", errors="backslashreplace") as stream:
        stream.write(lines)


def _encode(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become text that `float()` parses."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _decode(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) if value in _NOT_FINITE else value for name, value in metrics.items()}

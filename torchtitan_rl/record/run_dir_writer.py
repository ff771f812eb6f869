"""Writes the events of a run to its directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from torchtitan_rl.record.recorder import (
    DrawEvents,
    EvaluatedAttempts,
    Listener,
    Metrics,
    Published,
    RolloutsEnded,
    TrainedOn,
)
from torchtitan_rl.record.records import Trained, rollout_records
from torchtitan_rl.record.run_dir import RunDir

__all__ = ["RunDirWriter"]


class RunDirWriter(Listener):
    """Writes events to a run's directory: metrics, rollouts, evaluations, draws and policy versions."""

    def __init__(self, run_dir: RunDir, decode: Callable[[list[int]], str] | None = None) -> None:
        """`decode` turns tokens into text; with None, rollouts are recorded without what is per turn or token."""
        self._run_dir, self._decode = run_dir, decode
        self._trained: Sequence[Trained] = []

    def metrics(self, event: Metrics) -> None:
        self._run_dir.log_metrics(event.line)

    def draws(self, event: DrawEvents) -> None:
        self._run_dir.record("ledger", event.step, event.records)

    def evaluated(self, event: EvaluatedAttempts) -> None:
        self._run_dir.record("evaluations", event.step, event.records)

    def published(self, event: Published) -> None:
        at = datetime.now().astimezone().isoformat(timespec="milliseconds")
        self._run_dir.record("versions", event.step, [{"version": event.version, "seconds": event.seconds, "at": at}])

    def trained(self, event: TrainedOn) -> None:
        if self._decode is not None:
            self._trained = event.sequences

    def rollouts(self, event: RolloutsEnded) -> None:
        records = rollout_records(event.groups, self._trained, self._decode)
        self._run_dir.record("rollouts", event.step, ({"phase": "reinforcement", **record} for record in records))
        self._trained = []

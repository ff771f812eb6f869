"""The runs that a page shows."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_rl.health.diagnosis import Diagnosis, examine
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record.fork_point import fork_point
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.evaluation_completions import Completions
from torchtitan_rl.tools.health import Health, health_of
from torchtitan_rl.tools.rollouts import Rollouts
from torchtitan_rl.tools.run_tokenizer import tokenizer_of
from torchtitan_rl.tools.series import Series

__all__ = ["ShownRun", "open_runs"]

_DIAGNOSIS_S = 5.0
"""Seconds for which a diagnosis is shown; longer where it took longer than a quarter of a second."""
_DIAGNOSIS_SHARE = 0.05
"""Share of a core that diagnoses may take while a page is open: of a run of 100,000 steps one takes seconds."""


class ShownRun:
    """One run with what is read of it, each when it is first asked for. Threads may share it."""

    def __init__(self, run: Run, name: str, index: int) -> None:
        self.run, self.name, self.index = run, name, index
        self._series = Series(run.directory.metrics_file)
        self._lock, self._examining = threading.RLock(), threading.Lock()
        self._rollouts: Rollouts | None = None
        self._completions: Completions | None = None
        self._tokenizer: Any = None
        self._diagnosis: Diagnosis | str = ""
        self._valid_until = -math.inf

    @property
    def series(self) -> Series:
        """The metrics so far."""
        return self._series.refresh()

    @property
    def rollouts(self) -> Rollouts:
        with self._lock:
            if self._rollouts is None:
                self._rollouts = Rollouts(self.run.directory)
            return self._rollouts

    @property
    def completions(self) -> Completions:
        """The completions of the run's evaluations."""
        with self._lock:
            if self._completions is None:
                self._completions = Completions(self.run.directory)
            return self._completions

    @property
    def fork(self) -> str:
        """Where the run came from, if it is a fork; else empty."""
        try:
            point = fork_point(self.run.path)
        except ValueError as error:
            return str(error)
        return "" if point is None else point.summary()

    @property
    def has_completions(self) -> bool:
        return (self.run.path / "evaluations").is_dir()

    @property
    def has_rollouts(self) -> bool:
        return (self.run.path / "rollouts").is_dir()

    @property
    def tokenizer(self) -> Any:
        """None where the run's tokenizer is not on this machine."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = tokenizer_of(self.run)
            return self._tokenizer

    def health(self) -> Health:
        diagnosis = self.diagnosis()
        return health_of(self.run, self.series, [] if isinstance(diagnosis, str) else diagnosis.findings)

    def diagnosis(self) -> Diagnosis | str:
        """What the rules say, or why they could not read the run; computed anew after some seconds."""
        with self._examining:  # a lock of its own: other pages do not wait for the rules
            if (began := time.monotonic()) > self._valid_until:
                self._diagnosis, ended = _diagnosed(self.run), time.monotonic()
                self._valid_until = ended + max(_DIAGNOSIS_S, (ended - began) / _DIAGNOSIS_SHARE)
            return self._diagnosis


def open_runs(paths: Sequence[str | Path]) -> list[ShownRun]:
    """The runs at some paths, each under a name of its own: its directory's, with as many parents as it takes. A run
    may begin later: its path need not exist yet. Raises ValueError for a path that is no directory."""
    runs = list({run.path.resolve(): run for run in map(_opened, paths)}.values())
    names = [run.name for run in runs]
    depth = 1
    while len(set(names)) < len(names):
        depth += 1
        names = ["/".join(run.path.resolve().parts[-depth:]) for run in runs]
    return [ShownRun(run, name, index) for index, (run, name) in enumerate(zip(runs, names))]


def _opened(path: str | Path) -> Run:
    return Run.open(path) if Path(path).exists() else Run(RunDir(path))


def _diagnosed(run: Run) -> Diagnosis | str:
    try:
        return examine(run)
    except Exception as error:  # a run may hold anything; the rest of the page is still of use
        return f"The rules could not read this run ({type(error).__name__}: {str(error)[:200]})."

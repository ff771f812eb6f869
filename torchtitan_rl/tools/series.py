"""Metrics of a run as columns, read while the run goes on: a line is read once, and numbers take eight bytes."""

from __future__ import annotations

import threading
from array import array
from pathlib import Path
from typing import Any

from torchtitan_rl.metrics import PHASES
from torchtitan_rl.record.json_lines import parsed

__all__ = ["Series"]

_CHECKED = 512


class Series:
    """The lines of a `metrics.jsonl` so far. Threads may share it. A file that was cut back, as a resume does, is read
    anew."""

    def __init__(self, file: Path) -> None:
        self.file, self._lock = file, threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._offset, self._tail = 0, b""
        self.version = getattr(self, "version", 0) + 1
        """Changes whenever a line was read."""
        self._columns: dict[tuple[str, str], tuple[array, array]] = {}
        self.other_lines: list[dict[str, Any]] = []
        """Lines of evaluations, checkpoints and early ends, in order."""
        self.num_bad = 0
        """Lines that are no JSON objects with a step and a phase."""

    def refresh(self) -> Series:
        """Reads the complete lines that were added."""
        with self._lock:
            try:
                with open(self.file, "rb") as stream:
                    stream.seek(max(0, self._offset - len(self._tail)))
                    if stream.read(len(self._tail)) != self._tail:
                        self._forget()
                    stream.seek(self._offset)
                    content = stream.read()
            except FileNotFoundError:
                self._forget()
                return self
            if end := content.rfind(b"\n") + 1:
                for line in content[:end].splitlines():
                    self._add(line)
                self._offset, self._tail = self._offset + end, (self._tail + content[:end])[-_CHECKED:]
                self.version += 1
        return self

    def phases(self) -> list[str]:
        """The phases with numbers at each step, in the order of their first lines."""
        return list(dict.fromkeys(phase for phase, _ in self._columns))

    def names(self, phase: str = "reinforcement") -> list[str]:
        """The metrics of a phase, sorted."""
        return sorted(name for of, name in list(self._columns) if of == phase)

    def column(self, name: str, phase: str = "reinforcement") -> tuple[list[int], list[float]]:
        """Steps and values of a metric, equally many; empty where the run has none."""
        with self._lock:
            steps, values = self._columns.get((phase, name), (array("q"), array("d")))
            return steps.tolist(), values.tolist()

    def last(self, name: str, phase: str = "reinforcement", n: int = 1) -> list[float]:
        """The last `n` values of a metric, oldest first."""
        with self._lock:
            return self._columns[phase, name][1][-n:].tolist() if (phase, name) in self._columns else []

    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of evaluations, in order."""
        return [line for line in self.other_lines if line["phase"] == "evaluation"]

    def _add(self, line: bytes) -> None:
        try:
            metrics = parsed(line)
            step, phase = int(metrics["step"]), str(metrics["phase"])
        except (ValueError, TypeError, KeyError, OverflowError):
            self.num_bad += bool(line.strip())
            return
        if phase not in PHASES:
            self.other_lines.append(
                {name: _plain(value) for name, value in metrics.items()} | {"step": step, "phase": phase}
            )
            return
        for name, value in metrics.items():
            value = _plain(value)
            if name not in ("step", "phase") and isinstance(value, (int, float)):
                steps, values = self._columns.setdefault((phase, name), (array("q"), array("d")))
                steps.append(step)
                values.append(value)


def _plain(value: Any) -> Any:
    """A value as it was logged: text stands for the numbers that JSON lacks."""
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value

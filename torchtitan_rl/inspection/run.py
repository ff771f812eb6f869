"""A run that somebody looks at: its config, metrics and records, finished or going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torchtitan_rl.observability.run_dir import RunDir

__all__ = ["Run"]


class Run:
    """A run's directory, opened for reading. Nothing is ever written. Example: `Run.open("runs/first").metrics()`."""

    def __init__(self, directory: RunDir) -> None:
        self.directory = directory

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Raises ValueError for a path that is no directory."""
        if not Path(path).is_dir():
            raise ValueError(f"run={str(path)!r}: is no directory; give the directory of a run, such as runs/first")
        return cls(RunDir(path))

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def config(self) -> dict[str, Any]:
        """The resolved config; {} where config.json is missing or was cut off."""
        try:
            return json.loads(self.directory.config_file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return {}

    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return self.directory.read_metrics()

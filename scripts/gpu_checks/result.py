"""How a check says what it found: a small JSON file, written again with every finding, so that a crash loses none."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_rl.environment import end_with_parent

__all__ = ["Result", "largest_of", "run_check"]

_Finding = TypeVar("_Finding")


class Result:
    """What one check has found so far. `status` is `running` until `finish` makes it `passed` or `failed`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.status, self.values, self.problems = "running", {}, []
        self._write()

    def run_directory(self) -> str:
        """A path for the run of this check, which does not exist yet and stays: its logs say why it failed."""
        place = self._path.parent.parent / "run"
        place.mkdir(exist_ok=True)
        return f"{tempfile.mkdtemp(prefix=f'{self._path.stem}-', dir=place)}/run"

    def part(self, name: str) -> Path:
        """The result file of a part of this check that is a process of its own. It stays, whoever is killed first."""
        return self._path.with_name(f"{self._path.stem}.{name}.json")

    def note(self, **values: Any) -> None:
        """Adds findings by name: numbers, texts, or lists of them."""
        self.values |= values
        self._write()

    def require(self, fulfilled: bool, problem: str) -> None:
        """Unless fulfilled, the check will have failed, for this reason; it goes on."""
        if not fulfilled:
            self.problems.append(problem)
            self._write()

    def attempt(self, name: str, measure: Callable[[], _Finding]) -> _Finding | None:
        """What `measure` returns, or None where it raises: the check goes on, and has failed by this name. Only that
        the device's memory does not suffice is a finding like another, under `out_of_memory`."""
        try:
            return measure()
        except Exception as error:
            traceback.print_exc()
            if type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
                self.note(out_of_memory=[*self.values.get("out_of_memory", []), name])
            else:
                self.require(False, f"{name}: {_one_line(error)}")
        return None

    def finish(self) -> bool:
        """Whether the check has passed."""
        self.status = "failed" if self.problems else "passed"
        self._write()
        return self.status == "passed"

    def _write(self) -> None:
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps({"status": self.status, "values": self.values, "problems": self.problems}))
        new.rename(self._path)  # whoever reads never meets half a file


def largest_of(figures: Iterable[float]) -> float:
    """The largest of some figures, or NaN where one is NaN: Python's `max` may pass over it, and no bound would fail.
    Raises ValueError for no figure."""
    figures = list(figures)
    return math.nan if any(map(math.isnan, figures)) else max(figures)


def run_check(
    check: Callable[[Result, argparse.Namespace], None], parser: argparse.ArgumentParser | None = None
) -> None:
    """Runs a check as this process: arguments, result file, exit status 0 if it passed, else 1. Does not return."""
    parser = parser or argparse.ArgumentParser(description=check.__doc__)
    parser.add_argument("--result", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    args = parser.parse_args()
    end_with_parent(signal.SIGKILL)  # a check has a session of its own, which a killed battery leaves behind
    result = Result(args.result)
    try:
        check(result, args)
    except Exception as error:
        traceback.print_exc()
        result.require(False, _one_line(error))
    passed = result.finish()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if passed else 1)  # threads of engines and actors must not keep a finished check alive


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]

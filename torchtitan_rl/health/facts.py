"""What the rules about a run look at: its config, lines of metrics, newest rollouts, samples of its processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torchtitan_rl.health.newest import newest_rollouts
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.health.siblings import recorded_compares_siblings
from torchtitan_rl.health.whereabouts import Whereabouts, whereabouts
from torchtitan_rl.record.attempts import steps_before
from torchtitan_rl.record.json_lines import parsed

__all__ = ["RunFacts", "Reading", "Series", "duration", "readings", "spans_of"]

_NOT_FINITE = ("NaN", "Infinity", "-Infinity")


class Reading(NamedTuple):
    """A number (or a text) with its name and the step at which it was read; None: no step."""

    name: str
    step: int | None
    value: float | str


Series = list[Reading]


class RunFacts:
    """A run as the rules see it. `missing` says, one sentence each, what could not be read.

    `RunFacts.of(run)` reads a directory; `RunFacts(lines=..., ...)` has what a run that is going on has told.
    """

    def __init__(
        self,
        *,
        lines: Iterable[dict[str, Any]] = (),
        settings: dict[str, Any] | None = None,
        rollouts: Callable[[], list[dict[str, Any]]] = list,
        samples: Callable[[], list[dict[str, Any]]] = list,
        events: Iterable[dict[str, Any]] = (),
        status: dict[str, Any] | None = None,
        begun: Iterable[int] = (),
        whereabouts: Whereabouts | None = None,
        now: float | None = None,
        left_out: int = 0,
        series: dict[str, Series] | None = None,
    ) -> None:
        """`left_out`: batches of the run whose lines are not in `lines`. `series`: the readings of a metric in all
        batches, for those metrics that are known of all."""
        self.lines, self.settings, self.events, self.status = list(lines), settings or {}, list(events), status or {}
        self.begun = set(begun)
        """The steps of the reinforcement phase from which attempts at the run went on."""
        self.whereabouts, self.now = whereabouts, time.time() if now is None else now
        self.missing: list[str] = []
        self.failed: dict[str, str] = {}
        """Rule -> why its function failed on these records."""
        self._left_out = left_out
        self._rollouts, self._samples = rollouts, samples
        self._series: dict[str, Series] = dict(series or {})

    @classmethod
    def of(cls, run: Run, now: float | None = None) -> RunFacts:
        """The facts of a run's directory, finished or not. Raises nothing for files that are missing or cut off."""
        missing: list[str] = []
        directory = run.directory
        facts = cls(
            lines=_lines(directory.metrics_file, missing),
            settings=_object(directory.config_file, "defaults are taken for the settings", missing),
            rollouts=lambda: newest_rollouts(directory),
            samples=lambda: _records(run, "samples", missing),
            events=_records(run, "events", missing),
            begun=[steps_before(attempt) for attempt in _records(run, "attempts", missing)],
            status=_object(run.path / "status.json", "what the run was doing is not known", missing),
            whereabouts=whereabouts(run),
            now=now,
        )
        facts.missing = missing
        return facts

    @cached_property
    def rollouts(self) -> list[dict[str, Any]]:
        """The newest rollouts, oldest first, with few columns (`health.newest.COLUMNS`)."""
        return self._rollouts()

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Records of the table `samples`, oldest first."""
        return self._samples()

    @cached_property
    def compares_siblings(self) -> bool:
        """Whether the run trains on the rewards of siblings, compared with each other."""
        return recorded_compares_siblings(self.settings)

    @cached_property
    def spans(self) -> list[dict[str, Any]]:
        """What the run is doing, outer spans first, as `status.json` has it."""
        return spans_of(self.status)

    @property
    def best_reward(self) -> float:
        """The reward of a correct answer, `controller.correct_reward`."""
        return float(self.setting("controller.correct_reward", 1.0))

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """The lines of batches of the reinforcement phase."""
        return [line for line in self.lines if line.get("phase") == "reinforcement"]

    @property
    def num_batches(self) -> int:
        """Batches of the reinforcement phase so far."""
        return len(self.steps) + self._left_out

    @cached_property
    def own_evaluations(self) -> list[dict[str, Any]]:
        """The lines of the run's own evaluations, without those of `controller.eval_sets`."""
        sets = self.setting("controller.eval_sets", {})
        return [line for line in self.lines if line.get("phase") == "evaluation" and line.get("eval/name") not in sets]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines of the run's own evaluations on validation tasks."""
        return [
            line for line in self.own_evaluations if line.get("eval/split") == "validation" and "eval/accuracy" in line
        ]

    def series(self, name: str) -> Series:
        """The readings of a metric of the reinforcement phase, in order; lines without it are left out."""
        if name not in self._series:  # several rules ask for the same one, of a run of perhaps 100,000 lines
            self._series[name] = readings(name, self.steps)
        return self._series[name]

    def setting(self, path: str, otherwise: Any = None) -> Any:
        """A value of config.json by dotted path; `otherwise` where the file lacks it."""
        value: Any = self.settings
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                return otherwise
            value = value[name]
        return value


def readings(name: str, lines: Iterable[dict[str, Any]]) -> Series:
    """The readings of a metric in lines, in order; lines without it are left out."""
    return [Reading(name, int(line["step"]), line[name]) for line in lines if _number(line.get(name))]


def spans_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The open spans in what `status.json` holds; [] for one of another form."""
    spans = status.get("spans")
    return [span for span in spans if isinstance(span, dict)] if isinstance(spans, list) else []


def duration(seconds: float) -> str:
    """Seconds for a person: `1.0 s`, `40 s`, `5 min`, `2.5 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _records(run: Run, table: str, missing: list[str]) -> list[dict[str, Any]]:
    """The records of a table; [] where it is missing or cannot be read, with a sentence in `missing`."""
    if not (run.path / table).is_dir():
        if table != "events" or not (run.path / "status.json").exists():  # a run without a warning has no events
            missing.append(f"{table}/: is not there")
        return []
    try:
        return list(run.directory.tables[table].read())
    except Exception as error:
        missing.append(f"{table}/: cannot be read ({type(error).__name__}: {error})")
        return []


def _lines(file: Path, missing: list[str]) -> list[dict[str, Any]]:
    try:
        texts = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        missing.append("metrics.jsonl: is not there; nothing is known about steps")
        return []
    lines, broken = [], []
    for number, text in enumerate(texts[:-1], 1):
        try:
            line = parsed(text)
            assert isinstance(line, dict) and isinstance(line["step"], int)
            lines.append({name: float(value) if value in _NOT_FINITE else value for name, value in line.items()})
        except (ValueError, AssertionError, KeyError, TypeError):
            broken.append(number)
    if broken:
        missing.append(f"metrics.jsonl: line {broken[0]} is no line of metrics ({len(broken)} such lines are left out)")
    if texts[-1]:
        missing.append("metrics.jsonl: the last line is cut off and left out")
    if not lines:
        missing.append("metrics.jsonl: has no complete line; nothing is known about steps")
    return lines


def _object(file: Path, without: str, missing: list[str]) -> dict[str, Any]:
    """What a JSON file holds. {} where the file is missing or cut off; `missing` then gets a sentence that ends in
    `without`."""
    try:
        value = parsed(file.read_text(encoding="utf-8"))
    except OSError:
        missing.append(f"{file.name}: is not there; {without}")
    except ValueError:
        missing.append(f"{file.name}: is cut off or no JSON; {without}")
    else:
        return value if isinstance(value, dict) else {}
    return {}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

from torchtitan_rl.health.facts import Reading, RunFacts, Series

__all__ = ["Area", "Finding", "Rule", "Problem", "RECENT", "batches", "few", "first", "last", "middle", "worst"]

Area = Literal["liveness", "numerics", "learning"]

RECENT = 5
"""Batches over which a number is taken, so that a single noisy batch says nothing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a run."""

    rule: str
    area: Area
    what: str
    """One sentence: the cause, with numbers."""
    evidence: tuple[Reading, ...]
    """The numbers that say so, each with the step it was read at."""
    threshold: float
    advice: str
    """What to do."""

    def as_data(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        return asdict(self) | {"evidence": [reading._asdict() for reading in self.evidence]}


class Problem(NamedTuple):
    """What a rule's function returns when something is wrong."""

    sentence: str
    evidence: Series


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: data, and the function that looks. Example: `Rule("clip_share", "numerics", ...)`."""

    name: str
    area: Area
    find: Callable[[RunFacts, float], Problem | None]
    """Looks at a run; None: nothing is wrong, or too little is known."""
    threshold: float
    means: str
    """What the threshold is, with its unit."""
    reads: str
    """The evidence that the rule looks at."""
    advice: str
    lacks: Callable[[RunFacts], str]
    """What the rule would need to look and the run does not have, in words; empty where it can look, and where the run
    has nothing that the rule is about. See `batches`."""
    live: Literal["batches", "answers", "samples", ""] = "batches"
    """After what the rule looks during training: every batch, every fifth one, every sample. Empty: it does not,
    the run's own process cannot see such things."""

    def on(self, facts: RunFacts, threshold: float) -> Finding | None:
        problem = self.find(facts, threshold)
        if problem is None:
            return None
        return Finding(self.name, self.area, problem.sentence, tuple(problem.evidence), threshold, self.advice)


def batches(*names: str, number: int = RECENT) -> Callable[[RunFacts], str]:
    """What a rule lacks (`Rule.lacks`) that reads metrics in `number` batches."""

    def lacks(facts: RunFacts) -> str:
        return next((why for name in names if (why := few(f"`{name}`", len(facts.series(name)), number))), "")

    return lacks


def few(of: str, number: int, needed: int, unit: str = "batches") -> str:
    """The sentence on fewer readings than are needed; empty where there are enough."""
    if number >= needed:
        return ""
    return f"needs {of}" + (f" of {needed} {unit}; there are {number or 'none'}" if needed > 1 else "; there is none")


def first(series: Series, number: int = RECENT) -> Series:
    """The first readings; [] where there are fewer than `number`."""
    return series[:number] if len(series) >= number else []


def last(series: Series, number: int = RECENT) -> Series:
    """The last readings; [] where there are fewer than `number`."""
    return series[-number:] if len(series) >= number else []


def worst(series: Series, number: int = RECENT) -> Series:
    """The `number` readings in a row with the largest median; [] where there are fewer."""
    windows = [series[i : i + number] for i in range(len(series) - number + 1)]
    return max(
        windows, key=lambda window: (middle(window), sum(float(reading.value) for reading in window)), default=[]
    )


def middle(readings: Series) -> float:
    """The median of some readings. Raises StatisticsError for none."""
    return median(float(reading.value) for reading in readings)

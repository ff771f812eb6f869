"""Which arms of a sweep are not continued, because they are worse with confidence.

Arms are compared seed by seed with the best one: the mean of the differences, and the interval that Student's t gives
it. The chance that a sweep stops the arm that is truly best is at most `ERROR`: the arm can only be stopped where one
of the other arms looks better with confidence after one of the seeds, and `ERROR` is divided by the number of these
occasions (Bonferroni). That holds for differences that are normal over seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

__all__ = ["ERROR", "LEAST_PAIRS", "Stop", "differences", "mean_interval", "stopped", "t_quantile"]

ERROR = 0.05
"""The largest chance that a sweep stops the arm that is truly best."""
LEAST_PAIRS = 3
"""Pairs without which no arm is stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Why an arm is not continued."""

    best: str
    """The name of the arm that is better."""
    difference: float
    """The mean difference of accuracy to it, over the pairs so far."""
    upper: float
    """The upper bound of the difference."""
    pairs: int

    def summary(self) -> str:
        """Example: `worse than lr=1e-3 by 0.31, at least 0.12 (3 pairs)`."""
        return f"worse than {self.best} by {-self.difference:.3f}, at least {-self.upper:.3f} ({self.pairs} pairs)"


def stopped(
    accuracies: Mapping[str, Mapping[int, float]], *, num_arms: int, num_seeds: int, num_tasks: int
) -> dict[str, Stop]:
    """The arms to stop now: name -> why.

    `accuracies` are those of the arms that go on: name -> seed -> accuracy. `num_arms` and `num_seeds` are those that
    the sweep began with, `num_tasks` is the size of the evaluation.
    """
    common = set.intersection(*(set(arm_accuracies) for arm_accuracies in accuracies.values())) if accuracies else set()
    looks = num_seeds - LEAST_PAIRS  # after the last seed there is nothing left to save
    if len(common) < LEAST_PAIRS or looks < 1 or len(accuracies) < 2:
        return {}
    best = max(accuracies, key=lambda name: fmean(accuracies[name][seed] for seed in common))
    level = 1 - ERROR / ((num_arms - 1) * looks)
    stops = {}
    for name, arm_accuracies in accuracies.items():
        values = differences(arm_accuracies, accuracies[best])
        mean = fmean(values)
        upper = mean + _half_width(values, num_tasks, level)
        if upper < 0:
            stops[name] = Stop(best=best, difference=mean, upper=upper, pairs=len(values))
    return stops


def differences(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """`first` minus `second` for each seed that both have."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


def mean_interval(values: Sequence[float], num_tasks: int) -> tuple[float, float] | None:
    """The 95% interval of a mean over seeds, by Student's t; None for fewer than two values. The values are accuracies
    on `num_tasks` tasks, or differences of those."""
    if len(values) < 2:
        return None
    half = _half_width(values, num_tasks, 0.975)
    return fmean(values) - half, fmean(values) + half


def _half_width(values: Sequence[float], num_tasks: int, level: float) -> float:
    """How far the bound of a mean is from it. The spread over seeds counts as one task at least: equal values of few
    tasks do not mean that another seed would give the same."""
    spread = max(stdev(values), 1 / num_tasks)
    return t_quantile(level, len(values) - 1) * spread / math.sqrt(len(values))


def t_quantile(level: float, freedom: int) -> float:
    """The value that Student's t with `freedom` degrees of freedom is below with probability `level`, from 0.5 up."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, freedom) < 2 * level - 1 else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def _t_within(angle: float, freedom: int) -> float:
    """The probability that |t| is below tan(angle) * sqrt(freedom): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cosine, odd = math.cos(angle), freedom % 2
    term = total = 0.0 if freedom == 1 else cosine if odd else 1.0
    for k in range(2 + odd, freedom, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total

"""Paired comparisons of accuracy: two settings on the same tasks, from the same seeds or fork points.

Two runs that share draws and noise err on the same tasks, so the difference task by task spreads less than the
difference of two separate means. Every interval here is given both ways.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record.attempts import read_evaluations
from torchtitan_rl.record.fork_point import fork_point

__all__ = ["Needed", "PairedAccuracy", "needed", "paired_accuracies", "run_pairs"]

_RESAMPLES = 4000
_QUANTILES = (0.025, 0.975)
_ERRORS = NormalDist().inv_cdf(0.975) + NormalDist().inv_cdf(0.8)
"""Standard errors that a true difference must measure to be seen in four of five experiments, at a level of 5%."""


@dataclass(kw_only=True, slots=True)
class PairedAccuracy:
    """Greedy accuracy of two settings in one evaluation."""

    name: str
    split: str
    steps: list[int]
    """The step of the evaluation, for each pair of runs: the last one that both made."""
    first_PT: np.ndarray
    """1 where a task's completion was correct, by pair of runs and task: of the first setting."""
    second_PT: np.ndarray

    @property
    def difference(self) -> float:
        return float((self.second_PT - self.first_PT).mean())

    def interval(self, *, paired: bool) -> tuple[float, float]:
        """The middle 95% of the differences of resampled experiments: pairs of runs and tasks are drawn with
        replacement, both crossed (Owen 2007, "The pigeonhole bootstrap", Ann. Appl. Stat. 1:386-411). Not paired: the
        two settings are drawn apart. With one pair of runs, tasks alone are drawn."""
        num_pairs, num_tasks = self.first_PT.shape
        rng = np.random.default_rng(0)

        def weights() -> tuple[np.ndarray, np.ndarray]:
            pair_counts = rng.multinomial(num_pairs, [1 / num_pairs] * num_pairs, size=_RESAMPLES)
            return pair_counts, rng.multinomial(num_tasks, [1 / num_tasks] * num_tasks, size=_RESAMPLES)

        def means(correct_PT: np.ndarray, weights_RP: np.ndarray, weights_RT: np.ndarray) -> np.ndarray:
            return ((weights_RP @ correct_PT) * weights_RT).sum(1) / correct_PT.size

        first = weights()
        second = first if paired else weights()
        low, high = np.quantile(means(self.second_PT, *second) - means(self.first_PT, *first), _QUANTILES)
        return float(low), float(high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """How many tasks, and how many pairs of runs, show a difference; None where the spread is not known or 0."""

    tasks_paired: int | None
    tasks_unpaired: int | None
    runs_paired: int | None
    runs_unpaired: int | None


def needed(accuracy: PairedAccuracy, difference: float) -> Needed:
    """What a true difference would need to be seen in four of five experiments, at a level of 5% (two-sided, normal
    approximation). Tasks: for the difference between these runs. Pairs of runs, from two on: for other seeds too, on
    these tasks."""
    first, second = accuracy.first_PT, accuracy.second_PT
    many_tasks, many_pairs = first.shape[1] > 1, first.shape[0] > 1

    def number(variance: float) -> int | None:
        return math.ceil(variance * (_ERRORS / difference) ** 2) or None

    def over_tasks(*correct: np.ndarray) -> int | None:
        return number(float(sum(c.var(axis=1, ddof=1).mean() for c in correct))) if many_tasks else None

    def over_pairs(*correct: np.ndarray) -> int | None:
        return number(float(sum(c.mean(axis=1).var(ddof=1) for c in correct))) if many_pairs else None

    return Needed(
        tasks_paired=over_tasks(second - first),
        tasks_unpaired=over_tasks(first, second),
        runs_paired=over_pairs(second - first),
        runs_unpaired=over_pairs(first, second),
    )


def run_pairs(first: Sequence[Run], second: Sequence[Run]) -> list[tuple[Run, Run]]:
    """The runs of two settings that share seed and fork point, in order: two forks of one step of one run, a run and
    its own fork, or two runs of one seed that are no forks. A run has one partner at most."""
    remaining = list(second)
    pairs = []
    for run in first:
        partner = next((other for other in remaining if _are_pair(run, other)), None)
        if partner is not None:
            pairs.append((run, partner))
            remaining.remove(partner)
    return pairs


def _are_pair(first: Run, second: Run) -> bool:
    if first.config().get("seed") != second.config().get("seed"):
        return False
    points = [fork_point(run.path) for run in (first, second)]
    first_point, second_point = points
    if first_point is not None and second_point is not None:
        return (first_point.parent, first_point.step) == (second_point.parent, second_point.step)
    if first_point is None and second_point is None:
        return True
    parent, point = (first, second_point) if second_point is not None else (second, first_point)
    return point is not None and point.parent == str(parent.path.resolve())


def paired_accuracies(pairs: Sequence[tuple[Run, Run]]) -> list[PairedAccuracy]:
    """Each evaluation of the same tasks that both runs of every pair recorded, at the last step that a pair has in
    common. Counted are tasks that all runs recorded (`record.eval_completions`)."""
    correct = [tuple(_greedy(run) for run in pair) for pair in pairs]
    if not correct:
        return []
    sets = [name for name in correct[0][0] if all(name in run_sets for pair in correct for run_sets in pair)]
    accuracies = []
    for name in sets:
        common = [sorted(first[name].keys() & second[name].keys()) for first, second in correct]
        if not all(common):
            continue
        chosen = [(first[name][steps[-1]], second[name][steps[-1]]) for (first, second), steps in zip(correct, common)]
        tasks = sorted(set.intersection(*(set(run_sets) for pair in chosen for run_sets in pair)))
        if tasks:
            sides = [np.array([[pair[side][task] for task in tasks] for pair in chosen], float) for side in (0, 1)]
            steps = [pair_steps[-1] for pair_steps in common]
            accuracies.append(
                PairedAccuracy(name=name[0], split=name[1], steps=steps, first_PT=sides[0], second_PT=sides[1])
            )
    return accuracies


def _greedy(run: Run) -> dict[tuple[str, str], dict[int, dict[tuple[int, str], bool]]]:
    """(set, split) -> step -> task -> whether its greedy completion was correct."""
    by_set: dict[tuple[str, str], dict[int, dict[tuple[int, str], bool]]] = {}
    for record in read_evaluations(run.directory):
        if record["sample"] == 0:
            step_answers = by_set.setdefault((record["name"], record["split"]), {}).setdefault(record["step"], {})
            step_answers[record["task_index"], record["task_id"]] = bool(record["correct"])
    return by_set

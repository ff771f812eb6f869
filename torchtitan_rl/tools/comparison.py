"""What differs between runs, in their configs and in their numbers, beside the spread over seeds."""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any

from torchtitan_rl.config.config_difference import LABELS, leaves
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record.fork_point import fork_point
from torchtitan_rl.tools.first_difference import BatchDifference, first_difference
from torchtitan_rl.tools.pairing import PairedAccuracy, needed, paired_accuracies, run_pairs
from torchtitan_rl.tools.selection import curves, labels, matching, opened

__all__ = ["Comparison", "Group", "MetricRow", "add_arguments", "compare", "run"]

_SAME_GROUP = ("seed", *LABELS)
_RECORDING = "record."
"""Fields of a config that do not tell one group of runs from another: these names, and a section."""
_UNCOMPARED = ("num_tasks", "_ci95_low", "_ci95_high")
_LEGEND = """A value is the last evaluation, or the mean of the last quarter of the steps; +- its spread (standard
deviation) over seeds. After a difference stands its standard error, and how many of them the difference is: less than
two may well be chance, and with two or three seeds so may more."""


_PAIRED_LEGEND = """Pairs share seed and fork point. An interval draws tasks anew, and runs where there are two pairs
or more; of one pair it says nothing about other seeds, and of two or three it is too narrow."""


@dataclass(kw_only=True, slots=True)
class Group:
    """Runs whose configs differ in nothing but the seed."""

    letter: str
    runs: list[Run]
    names: list[str]
    """A short name for each run."""
    config: dict[str, Any]
    """Dotted path -> value, without seed, name and output directory."""
    seeds: list[Any]


@dataclass(kw_only=True, slots=True)
class MetricRow:
    """One metric: its value in each run of each group."""

    name: str
    values: list[list[float]]
    """One list per group, one value per run that has the metric."""

    def mean(self, group: int) -> float | None:
        return fmean(self.values[group]) if self.values[group] else None

    def spread(self, group: int) -> float | None:
        """Standard deviation over the group's runs, divided by n - 1; None for fewer than two."""
        return math.sqrt(variance(self.values[group])) if len(self.values[group]) > 1 else None

    def standard_error(self, first: int, second: int) -> float | None:
        """Of the difference of two groups' means, from the variance pooled over all groups with two runs or more; None
        where no group has two."""
        many = [values for values in self.values if len(values) > 1]
        if not many or not self.values[first] or not self.values[second]:
            return None
        pooled = sum(variance(values) * (len(values) - 1) for values in many) / sum(len(values) - 1 for values in many)
        return math.sqrt(pooled * (1 / len(self.values[first]) + 1 / len(self.values[second])))


@dataclass(kw_only=True, slots=True)
class Paired:
    """The runs of two groups that share seed and fork point."""

    letters: str
    """Example: `B - A`."""
    names: list[tuple[str, str]]
    """The names of each pair's runs."""
    parted: list[BatchDifference | None]
    """Where the runs of each pair part; None: nowhere."""
    accuracies: list[PairedAccuracy]


@dataclass(kw_only=True, slots=True)
class Comparison:
    groups: list[Group]
    config: dict[str, list[Any]]
    """Dotted path -> value in each group, for fields that differ; None where a config lacks the field."""
    rows: list[MetricRow]
    paired: list[Paired] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory; two or more")
    parser.add_argument("--metrics", default="", metavar="A,B", help="default: every metric that two groups have")
    parser.add_argument(
        "--detect", type=float, metavar="X", help="say how many tasks and runs a difference of accuracy X would need"
    )


def run(args: argparse.Namespace) -> int:
    if len(args.runs) < 2:
        raise ValueError(f"runs={args.runs[0]}: there is nothing to compare it with; give two runs or more")
    if args.detect is not None and not 0 < args.detect <= 1:
        raise ValueError(f"--detect={args.detect:g}: is no difference of accuracy; give one above 0, up to 1")
    metrics = [name for name in args.metrics.split(",") if name]
    print(text(compare([opened(path) for path in args.runs], metrics), args.detect))
    return 0


def compare(runs: Sequence[Run], metrics: Sequence[str] = ()) -> Comparison:
    """Groups the runs, and compares the groups. A metric of an evaluation is the last one, any other metric the mean of
    the last quarter of the phase's steps. Raises ValueError for a metric that no run has."""
    groups = _grouped(runs)
    paths = list(dict.fromkeys(path for group in groups for path in group.config))
    config = {path: [group.config.get(path) for group in groups] for path in paths}
    differing = {path: values for path, values in config.items() if any(value != values[0] for value in values)}
    finals: list[list[dict[str, float]]] = []
    """Of each group, of each run: its finite numbers at its end, by metric."""
    not_finite: dict[str, list[str]] = defaultdict(list)
    """Metric -> runs whose number is not finite."""
    for group in groups:
        finals.append([])
        for run, label in zip(group.runs, group.names, strict=True):
            final = _final(run)
            finals[-1].append({name: number for name, number in final.items() if math.isfinite(number)})
            for name in (name for name, number in final.items() if not math.isfinite(number)):
                not_finite[name].append(label)
    names = list(dict.fromkeys(name for group_finals in finals for run_finals in group_finals for name in run_finals))
    if lost := [metric for metric in metrics if not matching(metric, names) and matching(metric, not_finite)]:
        raise ValueError(f"metrics={','.join(lost)}: no run has finite numbers at its end; name other metrics")
    if unknown := [metric for metric in metrics if not matching(metric, names)]:
        raise ValueError(
            f"metrics={','.join(unknown)}: the runs have no such numbers; without --metrics every one is shown"
        )
    if metrics:
        names = [name for metric in metrics for name in matching(metric, names)]
    elif len(groups) > 1:
        names = [
            n for n in names if sum(any(n in run_finals for run_finals in group_finals) for group_finals in finals) > 1
        ]
    if not names:
        raise ValueError("runs: they have no numbers to compare; let them make some steps")
    rows = [
        MetricRow(
            name=name,
            values=[[run_finals[name] for run_finals in group_finals if name in run_finals] for group_finals in finals],
        )
        for name in sorted(names, key=lambda name: (not name.startswith("eval/"), name))
        if metrics or not name.endswith(_UNCOMPARED)
    ]
    notes = _notes(groups)
    if equal := [
        row.name
        for row in rows
        if len({value for values in row.values for value in values}) == 1 and sum(map(len, row.values)) == len(runs)
    ]:
        notes.append(f"equal in all runs: {', '.join(equal)}")
    rows = [row for row in rows if row.name not in equal]
    shown = {row.name for row in rows} | {*equal}
    notes += [
        f"{name}: not finite in {', '.join(run_names)}, which its means leave out"
        for name, run_names in sorted(not_finite.items())
        if name in shown
    ]
    return Comparison(groups=groups, config=differing, rows=rows, paired=_paired(groups), notes=notes)


def _paired(groups: list[Group]) -> list[Paired]:
    """Each group beside the first, where they have runs of one seed and fork point; with one group its runs of one seed
    and fork point, which should be copies."""
    paired = []
    for group in groups[1:]:
        if pairs := run_pairs(groups[0].runs, group.runs):
            paired.append(_pair(f"{group.letter} - {groups[0].letter}", pairs, groups[0], group))
    if len(groups) == 1:
        (group,) = groups
        pairs = [pair for i, run in enumerate(group.runs) for pair in run_pairs([run], group.runs[i + 1 :])]
        if pairs:
            paired.append(_pair(f"{group.letter} - {group.letter}", pairs, group, group))
    return paired


def _pair(letters: str, pairs: list[tuple[Run, Run]], first: Group, second: Group) -> Paired:
    names = {id(run): name for group in (first, second) for run, name in zip(group.runs, group.names)}
    return Paired(
        letters=letters,
        names=[(names[id(a)], names[id(b)]) for a, b in pairs],
        parted=[first_difference(a, b) for a, b in pairs],
        accuracies=paired_accuracies(pairs),
    )


def _grouped(runs: Sequence[Run]) -> list[Group]:
    groups: dict[str, Group] = {}
    for index, (run, name) in enumerate(zip(runs, labels(runs))):
        plain = run.config()
        config = {path: value for path, value in leaves(plain) if not _is_label(path)} if plain else {}
        key = json.dumps(config, sort_keys=True) if config else f"unknown {index}"
        if key not in groups:
            letter = chr(ord("A") + len(groups)) if len(groups) < 26 else str(len(groups) + 1)
            groups[key] = Group(letter=letter, runs=[], names=[], config=config, seeds=[])
        groups[key].runs.append(run)
        groups[key].names.append(name)
        groups[key].seeds.append(plain.get("seed"))
    return list(groups.values())


def _num_steps(run: Run) -> int:
    return max((line["step"] for line in run.lines() if line["phase"] == "reinforcement"), default=0)


def _is_label(path: str) -> bool:
    return path in _SAME_GROUP or path.startswith(_RECORDING)


def _final(run: Run) -> dict[str, float]:
    """Curve -> the last value of an evaluation, the mean of the last quarter of steps of anything else."""
    means = {}
    for name, curve in curves(run).items():
        last = max(curve)
        counted = [curve[last]] if name.startswith("eval/") else [x for step, x in curve.items() if step > 0.75 * last]
        if counted:
            means[name] = fmean(counted) if all(map(math.isfinite, counted)) else math.nan
    return means


def _notes(groups: list[Group]) -> list[str]:
    notes = []
    for group in groups:
        for run, name in zip(group.runs, group.names):
            notes += [f"{name}: {missing}" for missing in run.missing() if "rollouts" not in missing]
            if (point := fork_point(run.path)) is not None:
                notes.append(f"{name}: {point.summary()}")
        if len(group.runs) > len(set(map(str, group.seeds))) and group.config:
            notes.append(
                f"group {group.letter} has runs of one seed: they are copies, and say nothing about the spread"
            )
    if len(groups) == 1:
        notes.append("the runs differ in nothing but the seed")
    lasts = {_num_steps(run) for group in groups for run in group.runs}
    if len(lasts) > 1:
        notes.append(f"the runs made different numbers of steps of reinforcement: {', '.join(map(str, sorted(lasts)))}")
    alone = [group.letter for group in groups if len(group.runs) == 1]
    if len(alone) == len(groups):
        notes.append("one seed only in every group: nobody knows which of these differences are chance; add seeds")
    elif alone:
        notes.append(f"one seed only in {', '.join(alone)}: the spread is taken from the other groups")
    return notes


def text(comparison: Comparison, detect: float | None = None) -> str:
    """The comparison as aligned lines. `detect`: a difference of accuracy, to say how much would show it."""
    groups, parts = comparison.groups, []
    rows = [[g.letter, _seeds(g), ", ".join(g.names)] for g in groups]
    parts.append(_aligned([["group", "seeds", "runs"], *rows]))
    letters = [group.letter for group in groups]
    if comparison.config:
        rows = [[path, *(_short(value) for value in values)] for path, values in comparison.config.items()]
        parts.append(_aligned([["config", *letters], *rows]))
    heads = [f"{letter} - {letters[0]}" for letter in letters[1:]]
    table = [["metric", *letters, *(column for head in heads for column in (head, "+-"))]]
    for row in comparison.rows:
        cells = [_mean(row, i) for i in range(len(groups))]
        for i in range(1, len(groups)):
            cells += _difference(row, i)
        table.append([row.name, *cells])
    parts.append(_aligned(table))
    parts.append(_LEGEND)
    parts += [text for paired in comparison.paired for text in _paired_texts(paired, detect)]
    parts += ["\n".join(f"note: {note}" for note in comparison.notes)] if comparison.notes else []
    return "\n\n".join(parts)


def _paired_texts(paired: Paired, detect: float | None) -> list[str]:
    """Where the pairs part, and their accuracies on the same tasks."""
    parted = [
        f"first batch that differs, {first} and {second}: {'none' if difference is None else difference.summary()}"
        for (first, second), difference in zip(paired.names, paired.parted)
    ]
    if not paired.accuracies:
        return ["\n".join(parted)]
    head = ["accuracy on the same tasks", "step", "pairs", "tasks", paired.letters, "95% paired", "95% not paired"]
    rows, sizes = [], []
    for accuracy in paired.accuracies:
        bounds = (accuracy.interval(paired=paired_draws) for paired_draws in (True, False))
        intervals = [f"{low:+.3f} to {high:+.3f}" for low, high in bounds]
        steps = "/".join(dict.fromkeys(map(str, accuracy.steps)))
        name = f"{accuracy.name} {accuracy.split}"
        rows.append([name, steps, *map(str, accuracy.first_PT.shape), f"{accuracy.difference:+.3f}", *intervals])
        if detect is not None:
            n = needed(accuracy, detect)
            counts = [n.tasks_paired, n.tasks_unpaired, n.runs_paired, n.runs_unpaired]
            sizes.append([name, *("-" if count is None else str(count) for count in counts)])
    texts = ["\n".join(parted), _aligned([head, *rows])]
    if sizes:
        columns = ["tasks, paired", "tasks, not paired", "pairs of runs", "runs each, not paired"]
        texts.append(_aligned([[f"to see {detect:g} in 4 of 5 experiments", *columns], *sizes]))
    return [*texts, _PAIRED_LEGEND]


def _seeds(group: Group) -> str:
    return ", ".join("?" if seed is None else str(seed) for seed in group.seeds)


def _mean(row: MetricRow, group: int) -> str:
    mean, spread = row.mean(group), row.spread(group)
    if mean is None:
        return "-"
    return f"{mean:.4g}" if spread is None else f"{mean:.4g} +- {spread:.2g}"


def _difference(row: MetricRow, group: int) -> list[str]:
    first, second, error = row.mean(0), row.mean(group), row.standard_error(0, group)
    if first is None or second is None:
        return ["-", ""]
    difference = second - first
    if error is None:
        return [f"{difference:+.4g}", ""]
    times = f" ({abs(difference) / error:.1f} x)" if error else ""
    return [f"{difference:+.4g}", f"{error:.2g}{times}"]


def _short(value: Any) -> str:
    shown = "-" if value is None else json.dumps(value) if not isinstance(value, str) else value
    return shown if len(shown) <= 40 else shown[:37] + "..."


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)

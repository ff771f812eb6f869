"""The values of the pages on health, curves, evaluations and configs."""

from __future__ import annotations

import csv
import io
import json
import math
from itertools import accumulate
from typing import Any

from torchtitan_rl.config.resolve import is_function
from torchtitan_rl.metrics import PHASES, unit
from torchtitan_rl.record.curves import final_evaluations
from torchtitan_rl.tools.series import Series
from torchtitan_rl.tools.view.query import Parameters
from torchtitan_rl.tools.view.runs import ShownRun

__all__ = ["Missing", "configs", "curve_data", "curve_table", "curves", "evaluations", "health"]

_SHOWN = (
    "reward/mean",
    "eval/accuracy",
    "policy/entropy",
    "completion/length_mean",
    "reward/zero_std_frac",
    "mismatch/kl",
    "optim/grad_norm",
    "policy/clip_frac",
    "time/step_s",
    "supervised: loss/mean",
    "preference: loss/mean",
    "preference: rewards/accuracy",
)
"""Curves that are shown unless an address asks for others."""
_SMOOTH = ("1", "5", "20", "100")
_MAX_CURVES = 64
"""Metrics of one answer; the page's script asks for the curves that are in sight."""
_SCALES = ("linear", "log")
_DISTRIBUTIONS = (("reward", "reward"), ("advantage", "advantage"), ("num_tokens", "tokens"))
_BINS = 24
_MOST_ACCURACIES = 6
_NUMBERS = ("reward/mean", "policy/entropy", "completion/length_mean", "time/step_s")


class Missing(ValueError):
    """An address of something that is not there."""


def health(parameters: Parameters) -> dict[str, Any]:
    chosen = parameters.chosen()
    cards = []
    for shown in chosen:
        series = shown.series
        state = shown.health()
        diagnosis = shown.diagnosis()
        batch_s, steps = (series.last(name, n=20) for name in ("time/step_s", "optim/num_steps"))
        step, num_steps = (_count(state.status.get(name)) for name in ("step", "num_steps"))
        usual = sum(batch_s) / (sum(steps) or len(batch_s)) if batch_s else 0.0  # of an optimizer step
        cards.append(
            {
                "run": shown,
                "fork": shown.fork,
                "health": state,
                "diagnosis": None if isinstance(diagnosis, str) else diagnosis,
                "problem": diagnosis if isinstance(diagnosis, str) else "",
                "numbers": [
                    *_newest_accuracies(series),
                    *((name, values[-1]) for name in _NUMBERS if (values := series.last(name))),
                ],
                "phase": str(state.status.get("phase") or ""),
                "step": step,
                "num_steps": num_steps,
                "left_s": (num_steps - step) * usual if state.state == "running" and step < num_steps else 0.0,
            }
        )
    return {"chosen": chosen, "cards": cards, "live": True}


def _newest_accuracies(series: Series) -> list[tuple[str, float]]:
    """(in words, accuracy) of the newest evaluation on each set and split."""
    lines = [line for line in final_evaluations(series.evaluations()) if _is_number(line.get("eval/accuracy"))]
    several = len({line.get("eval/name") for line in lines}) > 1
    accuracies = []
    for line in sorted(lines, key=lambda line: -line["step"])[:_MOST_ACCURACIES]:
        of = f"{line.get('eval/name', '') if several else ''} {line.get('eval/split', '')}".strip()
        accuracies.append((f"accuracy, {of}, step {line['step']}", line["eval/accuracy"]))
    return accuracies


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def curves(parameters: Parameters) -> dict[str, Any]:
    chosen = parameters.chosen()
    names = sorted({name for shown in chosen for name in _names(shown.series)})
    known = frozenset(names)
    metrics = parameters.all("metric") or [name for name in _SHOWN if name in known]
    return {
        "chosen": chosen,
        "names": names,
        "metrics": list(dict.fromkeys(name for name in metrics if name in known)),
        "unknown": [name for name in metrics if name not in known],
        "smooth": parameters.choice("smooth", _SMOOTH),
        "smooths": _SMOOTH,
        "scale": parameters.choice("scale", _SCALES),
        "scales": _SCALES,
        "unit": lambda name: unit(name.rpartition(": ")[2]),
        "distributions": [_distribution(chosen, column, label) for column, label in _DISTRIBUTIONS],
        "live": True,
    }


def _distribution(chosen: list[ShownRun], column: str, label: str) -> dict[str, Any]:
    """A histogram per run of a number of the newest steps' rollouts, over common bins. Heights are shares of the
    largest bin."""
    numbers = [
        (shown, [x for x in shown.rollouts.numbers(column) if math.isfinite(x)] if shown.has_rollouts else [])
        for shown in chosen
    ]
    every = [x for _, run_numbers in numbers for x in run_numbers]
    low, high = min(every, default=0.0), max(every, default=0.0)
    rows = []
    for shown, run_numbers in numbers:
        counts = [0] * _BINS
        for x in run_numbers:
            counts[min(_BINS - 1, int(_BINS * (x - low) / (high - low))) if high > low else _BINS // 2] += 1
        most = max(counts)
        if run_numbers:
            rows.append({"run": shown, "heights": [n / most for n in counts], "num": len(run_numbers), "most": most})
    return {"label": label, "low": low, "high": high, "rows": rows}


def curve_table(parameters: Parameters) -> str:
    """The curves of an address as CSV, a row per point, not smoothed: run, metric, set and split, step, value."""
    chosen = parameters.chosen()
    file = io.StringIO()
    table = csv.writer(file)
    table.writerow(("run", "metric", "of", "step", "value"))
    for name in parameters.all("metric") or sorted({name for shown in chosen for name in _names(shown.series)}):
        for shown in chosen:
            for label, steps, values in _columns(shown.series, name):
                table.writerows((shown.name, name, label, step, value) for step, value in zip(steps, values))
    return file.getvalue()


def curve_data(parameters: Parameters) -> dict[str, Any]:
    """The curves of an address, for its script: per metric and run, steps and values; null for a number that JSON does
    not have. Nothing but the state's name where the state is the one that the script has."""
    chosen = parameters.chosen()
    series = {shown.name: shown.series for shown in chosen}
    state = "-".join(str(read.version) for read in series.values())
    if parameters.text("have") == state:
        return {"state": state}
    metrics, width = parameters.all("metric"), int(parameters.choice("smooth", _SMOOTH))
    if len(metrics) > _MAX_CURVES:
        raise ValueError(f"metric: {len(metrics)} are asked for, and {_MAX_CURVES} may be; ask for some at a time")
    charts = []
    for name in metrics:
        lines = []
        for shown in chosen:
            for label, steps, values in _columns(series[shown.name], name):
                title = f"{shown.name} {label}".strip()
                values = _smoothed(values, width)
                lines.append({"run": shown.index, "name": title, "steps": steps, "values": _finite(values)})
        charts.append({"metric": name, "lines": lines})
    return {"state": state, "charts": charts}


def _names(series: Series) -> list[str]:
    names = series.names() + [f"{phase}: {name}" for phase in PHASES[:-1] for name in series.names(phase)]
    evaluated = {name for line in series.evaluations() for name, value in line.items() if _is_number(value)}
    return names + sorted(name for name in evaluated if name.startswith("eval/"))


def _columns(series: Series, name: str) -> list[tuple[str, list[int], list[float]]]:
    """(label, steps, values) of a metric; an evaluation has a line for each set of tasks."""
    if name.startswith("eval/"):
        lines: dict[str, tuple[list[int], list[float]]] = {}
        several = len({line.get("eval/name") for line in series.evaluations()}) > 1
        for line in series.evaluations():
            if _is_number(line.get(name)):
                label = f"{line.get('eval/name', '') if several else ''} {line.get('eval/split', '')}".strip()
                steps, values = lines.setdefault(label, ([], []))
                if steps and steps[-1] == line["step"]:
                    values[-1] = line[name]
                else:
                    steps.append(line["step"])
                    values.append(line[name])
        return [(label, steps, values) for label, (steps, values) in lines.items()]
    phase, _, metric = name.rpartition(": ")
    steps, values = series.column(metric, phase or "reinforcement")
    return [("", steps, values)] if steps else []


def _smoothed(values: list[float], width: int) -> list[float]:
    """Means over the last `width` values, without those that are not finite; NaN where none of them is."""
    if width == 1:
        return values
    finite = [math.isfinite(value) for value in values]
    sums = list(accumulate((value if is_finite else 0.0 for value, is_finite in zip(values, finite)), initial=0.0))
    counts = list(accumulate(finite, initial=0))
    smooth = []
    for end in range(1, len(values) + 1):
        begin = max(0, end - width)
        num = counts[end] - counts[begin]
        smooth.append((sums[end] - sums[begin]) / num if num else math.nan)
    return smooth


def _finite(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def evaluations(parameters: Parameters) -> dict[str, Any]:
    """A table per run: a row per evaluation, a column per number, and how many completions are recorded."""
    chosen = parameters.chosen()
    tables = []
    for shown in chosen:
        lines = shown.series.evaluations()
        counts = shown.completions.counts() if shown.has_completions else {}
        names = dict.fromkeys(name for line in lines for name in line)
        columns = [n for n in names if n not in ("step", "phase", "eval/name", "eval/split") and "_ci95_" not in n]
        rows = [
            {
                "step": line["step"],
                "name": line.get("eval/name", ""),
                "split": line.get("eval/split", ""),
                "cells": [(line.get(name), _interval(line, name)) for name in columns],
                "recorded": counts.get((line["step"], line.get("eval/name", ""), line.get("eval/split", ""))),
            }
            for line in lines
        ]
        tables.append({"run": shown, "columns": columns, "rows": rows})
    return {"chosen": chosen, "tables": tables, "live": True}


def _interval(line: dict[str, Any], name: str) -> tuple[Any, Any] | None:
    low, high = line.get(f"{name}_ci95_low"), line.get(f"{name}_ci95_high")
    return None if low is None or high is None else (low, high)


def configs(parameters: Parameters) -> dict[str, Any]:
    """Fields of the configs: those that differ, or all."""
    chosen = parameters.chosen()
    flat = [dict(_leaves(shown.run.config())) for shown in chosen]
    show = parameters.choice("show", ("differences", "all") if len(chosen) > 1 else ("all", "differences"))
    wanted = parameters.text("q").lower()
    paths = dict.fromkeys(path for fields in flat for path in fields)
    rows = []
    for path in paths:
        values = [fields.get(path, _ABSENT) for fields in flat]
        differs = any(value != values[0] for value in values[1:])
        if (differs or show == "all") and wanted in path.lower():
            rows.append((path, ["not there" if v is _ABSENT else _as_text(v) for v in values], differs))
    without = [shown for shown, fields in zip(chosen, flat) if not fields]
    return {"chosen": chosen, "rows": rows, "show": show, "without": without, "num_fields": len(paths)}


_ABSENT = object()


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """(dotted path, value) of every field; a function counts by its name and the hash of its source."""
    if is_function(value):
        hashes = ", ".join([value["source_sha256"], *value.get("argument_sha256", [])])
        return [(path, f"{value['function']} ({hashes})")]
    if not isinstance(value, dict) or not value:
        return [(path, value)] if path else []
    return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}" if path else str(key))]


def colour(shown: ShownRun) -> int:
    """The number of a run's colour."""
    return shown.index % 8

"""One picture of several runs, a panel per metric, a line per run; or its numbers as a table."""

from __future__ import annotations

import argparse
import csv
import difflib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.health.newest import COLUMNS, newest_rollouts
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.metrics import unit
from torchtitan_rl.record.curves import phase_of
from torchtitan_rl.record.plot import COLORS, MARKERS, Curve, draw_curve, label_axes, new_figure
from torchtitan_rl.tools.selection import curves, labels, matching, opened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D

__all__ = ["HISTOGRAMS", "METRICS", "SCALES", "add_arguments", "plot_runs", "run", "write_table"]

METRICS = (
    *("eval/accuracy", "reward/mean", "policy/entropy", "completion/length_mean", "optim/grad_norm", "mismatch/kl"),
    *("supervised/loss/mean", "preference/loss/mean", "preference/rewards/accuracy"),
)
"""What is drawn unless metrics are named."""
HISTOGRAMS = ("reward", "advantage", "num_tokens")
"""Columns of rollouts whose distribution can be drawn."""
SCALES = ("auto", "linear", "log")

_PANEL_INCHES, _COLUMNS = (5.0, 3.2), 3
_DASHES = ("-", "--", ":", "-.")
_MARKER_SIGNS = ("●", "■", "▲", "▼", "✚")
"""`MARKERS` as text."""
_MARKED = 12  # points up to which each has a marker
_BINS = 30
_LOG_FROM = 1000.0  # ratio of largest to smallest value from which a positive metric has a logarithmic axis


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument(
        "-o", "--output", default="curves.png", metavar="FILE", help="a new picture: .png, .svg, .pdf; or a table: .csv"
    )
    parser.add_argument("--metrics", default="", metavar="A,B", help=f"default: {','.join(METRICS)}")
    parser.add_argument(
        "--histograms",
        default="",
        metavar="A,B",
        help=f"of the newest batches' rollouts, beside the curves: {', '.join(HISTOGRAMS)}",
    )
    parser.add_argument(
        "--scale", choices=SCALES, default="auto", help="of the curves; auto: log where values span a thousandfold"
    )


def run(args: argparse.Namespace) -> int:
    runs = [opened(path) for path in args.runs]
    metrics, histograms = ([name for name in text.split(",") if name] for text in (args.metrics, args.histograms))
    if Path(args.output).suffix == ".csv":
        if histograms:
            raise ValueError(f"--histograms {args.histograms}: a table holds curves alone; end --output in .png")
        path = write_table(runs, args.output, metrics)
    else:
        path = plot_runs(runs, args.output, metrics, scale=args.scale, histograms=histograms)
    print(path)
    return 0


def write_table(runs: Sequence[Run], path: str | Path, metrics: Sequence[str] = ()) -> Path:
    """Writes the curves that `plot_runs` would draw as CSV, a row per point: run, curve, step, value. Returns the path.
    Raises ValueError as `plot_runs` does."""
    panels = _panels([curves(run) for run in runs], metrics)
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(("run", "curve", "step", "value"))
            for curves_by_run in panels.values():
                for name, by_name in zip(labels(runs), curves_by_run):
                    for label, curve in by_name.items():
                        table.writerows((name, label, step, curve[step]) for step in sorted(curve))
    except OSError as error:
        raise ValueError(f"output={str(path)!r}: cannot be written ({error.strerror}); give another file") from error
    return Path(path)


def plot_runs(
    runs: Sequence[Run],
    path: str | Path,
    metrics: Sequence[str] = (),
    *,
    scale: str = "auto",
    histograms: Sequence[str] = (),
) -> Path:
    """Writes the picture; its format is the file's ending. `metrics` are names of docs/metrics.md, or of curves
    (`supervised/loss/mean`); none: those of `METRICS` that some run has. x is the step of the phase. `scale` is one of
    `SCALES`; a logarithmic one leaves out values that are not above 0, and says how many. `histograms` are some of
    `HISTOGRAMS`. Returns the path.

    Raises ValueError for a metric that no run has, an ending that is no format, or a path that cannot be written;
    RuntimeError without matplotlib.
    """
    if unknown := [name for name in histograms if name not in HISTOGRAMS]:
        raise ValueError(f"histograms={unknown[0]}: is none of {', '.join(HISTOGRAMS)}")
    panels = _panels([curves(run) for run in runs], metrics)
    num_panels = len(panels) + len(histograms)
    columns = min(_COLUMNS, num_panels)
    rows = math.ceil(num_panels / columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.25 * math.ceil(len(runs) / columns))
    figure = new_figure(size)
    ending = Path(path).suffix.removeprefix(".")
    if ending not in (formats := figure.canvas.get_supported_filetypes()):
        raise ValueError(f"output={str(path)!r}: is no picture that can be written; end it in .{', .'.join(formats)}")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[num_panels:]:
        axes.remove()
    for axes, (metric, curves_by_run) in zip(grid.flat, panels.items()):
        _draw(axes, metric, curves_by_run, labels(runs), scale)
    newest = [newest_rollouts(run.directory, (*COLUMNS, *HISTOGRAMS)) for run in runs] if histograms else []
    for axes, name in zip(grid.flat[len(panels) :], histograms):
        _draw_histogram(axes, name, newest)
    keys = {str(line.get_label()): line for axes in figure.axes[: len(panels)] for line in axes.get_lines()}
    handles = [_key(line) for line in keys.values()]
    figure.legend(handles, list(keys), loc="outside lower center", ncols=columns, frameon=False, handlelength=3.5)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"output={str(path)!r}: cannot be written ({error.strerror}); give another file") from error
    return Path(path)


def _panels(curves_by_run: list[dict[str, Curve]], metrics: Sequence[str]) -> dict[str, list[dict[str, Curve]]]:
    """Metric -> for every run its curves by name."""
    every = list(dict.fromkeys(name for by_name in curves_by_run for name in by_name))
    panels: dict[str, list[dict[str, Curve]]] = {}
    for metric in metrics or METRICS:
        names = matching(metric, every)
        if names or metrics:
            if not names:
                raise ValueError(_nothing(metric, every))
            panels[metric] = [{name: by_name[name] for name in names if name in by_name} for by_name in curves_by_run]
    if not panels:
        raise ValueError(_nothing("", every))
    return panels


def _nothing(metric: str, every: Iterable[str]) -> str:
    if not every:
        return "runs: hold no metrics yet; plot them after some steps"
    near = difflib.get_close_matches(metric, every, 3, cutoff=0.5) or sorted(every)[:5]
    return f"metrics={metric or 'the usual ones'}: no run has them; these have some: {', '.join(near)}"


def _key(line: Line2D) -> Line2D:
    """A run's entry in the legend: its colour and dashes. Markers tell sets and splits apart, not runs."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=line.get_color(), linestyle=line.get_linestyle(), linewidth=line.get_linewidth())


def _draw_histogram(axes: Axes, name: str, rows_by_run: list[list[dict[str, Any]]]) -> None:
    """The distribution of a number over the newest batches' rollouts, an outline per run over common bins."""
    from matplotlib.ticker import PercentFormatter

    values = [[x for row in rows if math.isfinite(x := _of_rollout(row.get(name)))] for rows in rows_by_run]
    every = [x for run_values in values for x in run_values]
    axes.set_title(f"{name.replace('num_', '')} of the newest batches' rollouts", fontsize=9)
    axes.set_xlabel(name.replace("num_", ""), fontsize=8)
    axes.set_ylabel("share of rollouts", fontsize=8)
    if not every:
        axes.text(0.5, 0.5, "no rollouts are recorded", ha="center", transform=axes.transAxes, fontsize=9)
        return
    low, high = min(every), max(every)
    for index, run_values in enumerate(values):
        if run_values:
            weights = [1 / len(run_values)] * len(run_values)
            axes.hist(run_values, bins=_BINS, range=(low, high), weights=weights, histtype="step", linewidth=1.3,
                      color=COLORS[index % len(COLORS)], linestyle=_DASHES[index // len(COLORS) % 4])  # fmt: skip
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(alpha=0.3)


def _of_rollout(value: Any) -> float:
    """A number of a rollout; the sum where each turn has one, NaN for none."""
    if isinstance(value, list):
        return float(sum(value))
    return math.nan if value is None else float(value)


def _draw(axes: Axes, metric: str, curves_by_run: list[dict[str, Curve]], runs: list[str], scale: str) -> None:
    """Colour and, from the sixth run on, dashes tell the runs apart; markers tell sets and splits apart."""
    names = list(dict.fromkeys(name for by_name in curves_by_run for name in by_name))
    values = []
    for index, by_name in enumerate(curves_by_run):
        for name, curve in by_name.items():
            values += [value for value in curve.values() if math.isfinite(value)]
            several = len(names) > 1
            marker = MARKERS[names.index(name) % len(MARKERS)] if several else "o" if len(curve) <= _MARKED else ""
            style = {"linestyle": _DASHES[index // len(COLORS) % 4], "marker": marker, "markersize": 4}
            draw_curve(axes, curve, color=COLORS[index % len(COLORS)], label=runs[index], linewidth=1.3, **style)
    if len(names) > 1:
        shown = ", ".join(f"{_MARKER_SIGNS[i % len(MARKERS)]} {_set_and_split(name)}" for i, name in enumerate(names))
        axes.set_title(f"{metric} ({shown})", fontsize=9)
    else:
        axes.set_title(metric, fontsize=9)
    wide = values and min(values) > 0 and max(values) / min(values) >= _LOG_FROM
    if any(value > 0 for value in values) and (scale == "log" or (scale == "auto" and wide)):
        axes.set_yscale("log", nonpositive="mask")
        if left_out := sum(value <= 0 for value in values):
            axes.set_title(f"{axes.get_title()}; {left_out} values are not above 0", fontsize=9)
    phase = phase_of(metric)
    x = "step" if phase == "reinforcement" else f"step of the {phase} phase"
    label_axes(axes, x, unit(metric), fontsize=8)


def _set_and_split(curve: str) -> str:
    """`eval/letter_sort/test/accuracy` -> `letter_sort test`."""
    parts = curve.split("/")
    return " ".join(parts[1:3]) if parts[0] == "eval" and len(parts) > 3 else curve

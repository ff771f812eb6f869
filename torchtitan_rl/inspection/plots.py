"""One picture of several runs: a panel per metric, a line per run."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.inspection.run import Run
from torchtitan_rl.inspection.selection import curves, labels, matching, opened
from torchtitan_rl.observability.plot import COLORS, MARKERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["METRICS", "add_arguments", "plot_runs", "run"]

METRICS = ("eval/accuracy", "reward/mean", "policy/entropy", "completion/length_mean", "optim/grad_norm", "mismatch/kl")
"""What is drawn unless metrics are named."""

_PANEL_INCHES, _DPI, _COLUMNS = (5.0, 3.2), 120, 3
_DASHES = ("-", "--", ":", "-.")
_MARKER_SIGNS = ("●", "■", "▲", "▼", "✚")
"""`MARKERS` as text."""
_MARKED = 12  # points up to which each has a marker
_LOG_FROM = 1000.0  # ratio of largest to smallest value from which a positive metric has a logarithmic axis

Curve = dict[int, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument("-o", "--output", default="curves.png", metavar="FILE", help="a new picture: .png, .svg, .pdf")
    parser.add_argument("--metrics", default="", metavar="A,B", help=f"default: {','.join(METRICS)}")


def run(args: argparse.Namespace) -> int:
    runs = [opened(path) for path in args.runs]
    metrics = [name for name in args.metrics.split(",") if name]
    path = plot_runs(runs, args.output, metrics)
    print(path)
    return 0


def plot_runs(runs: Sequence[Run], path: str | Path, metrics: Sequence[str] = ()) -> Path:
    """Writes the picture; its format is the file's ending. `metrics` are names of docs/metrics.md, or of curves
    (`supervised/loss/mean`); none: those of `METRICS` that some run has. x is the step of the phase. Returns the path.

    Raises ValueError for a metric that no run has, an ending that is no format, or a path that cannot be written;
    RuntimeError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"plot: matplotlib cannot be imported ({error}); pip install matplotlib") from error
    panels = _panels([curves(run) for run in runs], metrics)
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.25 * math.ceil(len(runs) / columns))
    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    ending = Path(path).suffix.removeprefix(".")
    if ending not in (formats := FigureCanvasAgg(figure).get_supported_filetypes()):
        raise ValueError(f"output={str(path)!r}: is no picture that can be written; end it in .{', .'.join(formats)}")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (metric, of_runs) in zip(grid.flat, panels.items()):
        _draw(axes, metric, of_runs, labels(runs))
    keys = {str(line.get_label()): line for axes in figure.axes for line in axes.get_lines()}
    figure.legend(list(keys.values()), list(keys), loc="outside lower center", ncols=columns, frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"output={str(path)!r}: cannot be written ({error.strerror}); give another file") from error
    return Path(path)


def _panels(of_runs: list[dict[str, Curve]], metrics: Sequence[str]) -> dict[str, list[dict[str, Curve]]]:
    """Metric -> for every run its curves by name."""
    every = list(dict.fromkeys(name for found in of_runs for name in found))
    panels: dict[str, list[dict[str, Curve]]] = {}
    for metric in metrics or METRICS:
        names = matching(metric, every)
        if names or metrics:
            if not names:
                raise ValueError(_nothing(metric, every))
            panels[metric] = [{name: found[name] for name in names if name in found} for found in of_runs]
    if not panels:
        raise ValueError(_nothing("", every))
    return panels


def _nothing(metric: str, every: Iterable[str]) -> str:
    if not every:
        return "runs: hold no metrics yet; plot them after some steps"
    near = difflib.get_close_matches(metric, every, 3, cutoff=0.5) or sorted(every)[:5]
    return f"metrics={metric or 'the usual ones'}: no run has them; these have some: {', '.join(near)}"


def _draw(axes: Axes, metric: str, of_runs: list[dict[str, Curve]], runs: list[str]) -> None:
    """Colour and, from the sixth run on, dashes tell the runs apart; markers tell sets and splits apart."""
    from matplotlib.ticker import MaxNLocator

    names = list(dict.fromkeys(name for found in of_runs for name in found))
    values = []
    for index, found in enumerate(of_runs):
        for name, curve in found.items():
            steps = sorted(curve)
            ys = [curve[step] if math.isfinite(curve[step]) else math.nan for step in steps]
            values += [y for y in ys if math.isfinite(y)]
            several = len(names) > 1
            marker = MARKERS[names.index(name) % len(MARKERS)] if several else "o" if len(steps) <= _MARKED else ""
            axes.plot(steps, ys, color=COLORS[index % len(COLORS)], linestyle=_DASHES[index // len(COLORS) % 4],
                      marker=marker, markersize=4, linewidth=1.3, label=runs[index])  # fmt: skip
    if len(names) > 1:
        shown = ", ".join(f"{_MARKER_SIGNS[i % len(MARKERS)]} {_where(name)}" for i, name in enumerate(names))
        axes.set_title(f"{metric} ({shown})", fontsize=9)
    else:
        axes.set_title(metric, fontsize=9)
    if values and min(values) > 0 and max(values) / min(values) >= _LOG_FROM:
        axes.set_yscale("log")
    axes.set_xlabel("step of the supervised phase" if metric.startswith("supervised/") else "step", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def _where(curve: str) -> str:
    """`eval/letter_sort/test/accuracy` -> `letter_sort test`."""
    parts = curve.split("/")
    return " ".join(parts[1:3]) if parts[0] == "eval" and len(parts) > 3 else curve

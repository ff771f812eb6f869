"""How curves are drawn into a picture, and the picture of one run: accuracy and reward over the reinforcement phase.

The verb `plot` draws several runs with the same functions. The page of the verb `view` draws in the browser.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.record.run_dir import RunDir

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLORS", "MARKERS", "Curve", "curve_of", "draw_curve", "label_axes", "new_figure", "plot_curve"]

Curve = dict[int, float]
"""Step -> value."""

# Okabe and Ito's palette, which people with any common form of colour blindness can tell apart. Shapes differ as well.
_SUPERVISED_COLOR = "#E69F00"
_REWARD_COLOR = "#009E73"
COLORS = ("#0072B2", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "v", "P")
_SIZE_INCHES, _DPI = (8.0, 6.0), 120


def new_figure(size_inches: tuple[float, float]) -> Figure:
    """An empty figure of 120 pixels per inch that needs no display. Raises RuntimeError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"plot: matplotlib cannot be imported ({error}); pip install matplotlib") from error
    figure = Figure(figsize=size_inches, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_curve(axes: Axes, curve: Curve, *, color: str, label: str, **style: Any) -> None:
    """Draws a curve from its first step to its last, with a gap at each value that is not finite. `style` is as for
    matplotlib's `plot`."""
    steps = sorted(curve)
    values = [curve[step] if math.isfinite(curve[step]) else math.nan for step in steps]
    axes.plot(steps, values, color=color, label=label, **style)


def label_axes(axes: Axes, x: str, y: str, **text: Any) -> None:
    """Names the axes of a panel; x counts steps. `text` is as for matplotlib's labels."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(y, **text)
    axes.set_xlabel(x, **text)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def curve_of(run_dir: RunDir) -> Path | None:
    """The run's curve.png, drawn again where metrics have come since; None where there is nothing to draw yet."""
    curve = run_dir.path / "curve.png"
    if not curve.exists() or curve.stat().st_mtime_ns < run_dir.metrics_file.stat().st_mtime_ns:
        try:
            plot_curve(run_dir.read_metrics(), curve)
        except ValueError:
            return None
    return curve


def plot_curve(metrics: list[dict[str, Any]], path: str | Path) -> Path:
    """Writes a PNG of 960 x 720 pixels. `metrics` are the lines of metrics.jsonl. Returns the path.

    Above: `eval/accuracy` per split; below: `reward/mean`. x is the step of the reinforcement phase. The shaded band
    left of 0 is the supervised phase; the accuracy at 0 follows it. Of several evaluations with the same split and step
    the last counts. Where there was a warm start, its `loss/mean` over its own steps comes last. Raises ValueError when
    there is neither an accuracy nor a reward.
    """
    from matplotlib.ticker import MaxNLocator

    accuracies = _accuracies(metrics)
    rewards = {
        line["step"]: line["reward/mean"]
        for line in metrics
        if line["phase"] == "reinforcement" and "reward/mean" in line
    }
    if not accuracies and not rewards:
        raise ValueError(
            f"metrics={len(metrics)} lines: hold neither eval/accuracy nor reward/mean; plot after some steps"
        )
    losses = {line["step"]: line.get("loss/mean", math.nan) for line in metrics if line["phase"] == "supervised"}
    num_supervised = len(losses)

    figure = new_figure(_SIZE_INCHES)
    panels = figure.subplots(3 if losses else 2, 1)
    above, below = panels[:2]
    above.sharex(below)
    above.tick_params(labelbottom=False)
    if losses:
        _draw_warm_start(panels[2], losses)
    _draw_accuracies(above, accuracies, "after the warm start" if num_supervised else "before the first step")
    draw_curve(below, rewards, color=_REWARD_COLOR, label="reward/mean")
    above.set_ylabel("accuracy")
    below.set_ylabel("mean reward")
    below.set_xlabel("step of the reinforcement phase")

    last = max([1, *rewards, *(step for points in accuracies.values() for step in points)])
    for axes in (above, below):
        _draw_phases(axes, num_supervised, last)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="lower right")
    below.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    # No ticks in the supervised band: x counts steps of the reinforcement phase.
    below.set_xticks([tick for tick in below.get_xticks() if 0 <= tick <= last])
    figure.savefig(path, format="png")
    return Path(path)


def _draw_warm_start(axes: Axes, losses: dict[int, float]) -> None:
    draw_curve(axes, losses, color=_SUPERVISED_COLOR, label="loss/mean of the warm start")
    label_axes(axes, "step of the supervised phase", "loss per token")
    axes.legend(loc="upper right")


def _accuracies(metrics: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Label -> step -> accuracy. The label is the split, preceded by the evaluation's name when names differ."""
    lines = [line for line in metrics if "eval/accuracy" in line]
    several = len({line.get("eval/name") for line in lines}) > 1
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for line in lines:
        split = line.get("eval/split", "")
        curves[f"{line['eval/name']} {split}" if several else split][line["step"]] = line["eval/accuracy"]
    return curves


def _draw_accuracies(axes: Axes, accuracies: dict[str, dict[int, float]], at_zero: str) -> None:
    for index, (label, points) in enumerate(accuracies.items()):
        color = COLORS[index % len(COLORS)]
        draw_curve(axes, points, color=color, label=label, marker=MARKERS[index % len(MARKERS)])
        if 0 in points:
            axes.axhline(points[0], color=color, linestyle=":", linewidth=1)
            axes.plot(
                [0],
                [points[0]],
                color=_SUPERVISED_COLOR,
                marker="D",
                markersize=9,
                markeredgecolor=color,
                linestyle="none",
                zorder=3,
                clip_on=False,
                label=f"{label} {at_zero}: {points[0]:.3f}",
            )
    axes.set_ylim(-0.02, 1.02)


def _draw_phases(axes: Axes, num_supervised: int, last: int) -> None:
    """Draws a shaded band left of 0 for the supervised phase, if there was one, and a line at 0."""
    width = 0.08 * last
    axes.set_xlim(-width if num_supervised else -0.02 * last, 1.02 * last)
    if num_supervised:
        axes.axvspan(-width, 0, color=_SUPERVISED_COLOR, alpha=0.25, linewidth=0)
        axes.axvline(0, color=_SUPERVISED_COLOR, linewidth=1)
        axes.text(
            -width / 2,
            0.5,
            f"supervised: {num_supervised} steps",
            rotation=90,
            ha="center",
            va="center",
            transform=axes.get_xaxis_transform(),
            fontsize=9,
        )

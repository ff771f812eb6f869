"""Which runs, and which of their curves, a picture or a comparison is about."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record.curves import points

__all__ = ["curves", "labels", "matching", "opened"]


def opened(path: str | Path) -> Run:
    """The run in a directory that has metrics. Raises ValueError for a directory without."""
    run = Run.open(path)
    if not run.directory.metrics_file.exists():
        hint = "give the directory of a run, such as runs/first"
        inner = sorted(file.parent.name for file in Path(path).glob("*/metrics.jsonl"))
        if inner:
            hint = f"give a run in it, such as {Path(path) / inner[0]}"
        raise ValueError(f"run={str(path)!r}: holds no metrics.jsonl; {hint}")
    return run


def curves(run: Run) -> dict[str, dict[int, float]]:
    """Name of a curve (`record.curves`) -> step -> value; the last value of a step counts."""
    by_name: dict[str, dict[int, float]] = defaultdict(dict)
    for line in run.lines():
        for name, value in points(line).items():
            by_name[name][line["step"]] = value
    return dict(by_name)


def matching(metric: str, names: Iterable[str]) -> list[str]:
    """The curves that a metric names: the one of that name, or those of all sets and splits that it is measured on.

    Example: `eval/accuracy` names `eval/letter_sort/validation/accuracy` and `eval/letter_sort/test/accuracy`.
    """
    area, _, rest = metric.partition("/")
    exact = [name for name in names if name == metric]
    return exact or [n for n in names if area == "eval" and n.startswith("eval/") and n.split("/", 3)[3:] == [rest]]


def labels(runs: Sequence[Run]) -> list[str]:
    """A short name for every run: its directory's, with so many parents that no two are alike."""
    paths = [run.path.resolve() for run in runs]
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = [str(Path(*path.parts[-depth:])) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names

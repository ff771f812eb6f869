"""From lines of metrics to curves: which curve each number of a line is a point of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchtitan_rl.metrics import PHASES

__all__ = ["final_evaluations", "phase_of", "points"]


def phase_of(curve: str) -> str:
    """The phase whose steps a curve counts: the one its name begins with, such as `supervised/`, else
    reinforcement."""
    phase = curve.partition("/")[0]
    return phase if phase in PHASES else "reinforcement"


def points(line: dict[str, Any]) -> dict[str, int | float]:
    """Name of a curve -> the line's value, for every number of a line; x is the line's `step`.

    A number of the reinforcement phase keeps its name (`reward/mean`). Every other phase is named first, because its
    steps or its measurements are others: `supervised/loss/mean`, `eval/letter_sort/test/accuracy`,
    `checkpoint/time/write_s`.
    """
    phase = line["phase"]
    if phase == "evaluation":
        before = f"eval/{line.get('eval/name', '')}/{line.get('eval/split', '')}/"
    elif phase == "reinforcement":
        before = ""
    else:
        before = f"{phase}/"
        early = str(line.get("checkpoint/name", "")).partition("-")[0]
        if early in PHASES:
            before = f"{early}/{before}"
    own = {"evaluation": "eval/", "reinforcement": ""}.get(phase, f"{phase}/")
    return {
        before + name.removeprefix(own): value
        for name, value in line.items()
        if name != "step" and isinstance(value, (int, float))
    }


def final_evaluations(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last evaluation on each set and split, in the order of their first ones."""
    last: dict[tuple[Any, Any], dict[str, Any]] = {}
    for line in lines:
        if line.get("phase") == "evaluation":
            last[line.get("eval/name"), line.get("eval/split")] = line
    return list(last.values())

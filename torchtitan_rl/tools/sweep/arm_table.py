"""The table of a sweep: one row per arm."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from torchtitan_rl.tools.sweep.arms import Arm
from torchtitan_rl.tools.sweep.results import RunResult, smallest_evaluations
from torchtitan_rl.tools.sweep.stop_rule import ERROR, LEAST_PAIRS, differences, mean_interval

__all__ = ["Mean", "ArmRow", "rows", "table_text", "write_table"]

_HEAD = ["arm", "seeds", "validation", "95%", "test", "95%", "minus base", "95%, paired", "state"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mean:
    """A mean over seeds, and its 95% interval; no bounds with one seed."""

    mean: float
    low: float | None
    high: float | None

    @classmethod
    def of(cls, values: list[float], *, within: tuple[float, float], num_tasks: int) -> Mean | None:
        """None without values. `within` are the least and the largest value that there can be, `num_tasks` is the size
        of the evaluation."""
        if not values:
            return None
        low, high = mean_interval(values, num_tasks) or (None, None)
        if low is None or high is None:
            return cls(mean=fmean(values), low=None, high=None)
        return cls(mean=fmean(values), low=max(low, within[0]), high=min(high, within[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmRow:
    arm: str
    is_base: bool
    seeds: list[int]
    """Seeds whose runs have come to their end."""
    validation: Mean | None
    """Greedy accuracy of the last evaluation."""
    test: Mean | None
    difference: Mean | None
    """Validation accuracy minus the base arm's, by seed; None for the base arm, and without a common seed."""
    state: str


def rows(
    arms: list[Arm], base: Arm, results: Mapping[Arm, Mapping[int, RunResult]], states: Mapping[Arm, str]
) -> list[ArmRow]:
    """`results` are by arm and seed."""
    table = []
    num_tasks, num_test_tasks = smallest_evaluations(results)
    for arm in arms:
        arm_results = results[arm]
        validation = {seed: result.validation for seed, result in arm_results.items()}
        base_validation = {seed: result.validation for seed, result in results[base].items()}
        paired = [] if arm == base else differences(validation, base_validation)
        table.append(
            ArmRow(
                arm=arm.name,
                is_base=arm == base,
                seeds=sorted(arm_results),
                validation=Mean.of(list(validation.values()), within=(0, 1), num_tasks=num_tasks),
                test=Mean.of([result.test for result in arm_results.values()], within=(0, 1), num_tasks=num_test_tasks),
                difference=Mean.of(paired, within=(-1, 1), num_tasks=num_tasks),
                state=states[arm],
            )
        )
    return table


def table_text(table: list[ArmRow], num_seeds: int, *, keep_all: bool) -> str:
    """The table in Markdown, with aligned columns, and what its intervals are. `keep_all`: the sweep stops no arm for
    being worse."""
    cells = [_HEAD, ["---"] * len(_HEAD)]
    for row in table:
        name = f"{row.arm} (base)" if row.is_base else row.arm
        cells.append(
            [
                name.replace("|", "\\|"),
                f"{len(row.seeds)} of {num_seeds}",
                *_cells(row.validation, ".3f"),
                *_cells(row.test, ".3f"),
                *_cells(row.difference, "+.3f"),
                row.state.replace("|", "\\|"),
            ]
        )
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEAD))]
    cells[1] = ["-" * width for width in widths]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in cells]
    legend = (
        "Greedy accuracy after the last step: means over seeds, with 95% intervals of Student's t. Differences are by "
        "seed, on validation tasks."
    )
    if not keep_all:
        legend += (
            f" From {LEAST_PAIRS} pairs on, an arm that is worse than the best one with confidence is stopped; the arm "
            f"that is truly best is stopped in {ERROR:.0%} of sweeps at most."
        )
    return "\n".join([*lines, "", legend])


def _cells(value: Mean | None, form: str) -> list[str]:
    """The mean and the interval."""
    if value is None:
        return ["-", "-"]
    interval = "-" if value.low is None else f"{value.low:{form}} to {value.high:{form}}"
    return [f"{value.mean:{form}}", interval]


def write_table(directory: Path, table: list[ArmRow], num_seeds: int, *, keep_all: bool) -> None:
    """Writes `table.json` and `table.md`."""
    plain = {"seeds": num_seeds, "arms": [asdict(row) for row in table]}
    texts = {"table.json": json.dumps(plain, indent=1), "table.md": table_text(table, num_seeds, keep_all=keep_all)}
    for name, text in texts.items():
        beside = directory / f"{name}.{uuid.uuid4().hex}"  # another process of the sweep may write its own
        beside.write_text(text + "\n", encoding="utf-8")
        os.replace(beside, directory / name)

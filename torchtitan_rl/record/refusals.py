"""What is wrong with a line of metrics or with a record, in words."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

__all__ = ["refuse_columns", "refuse_metrics"]


def refuse_columns(table: str, record: dict[str, Any], columns: Collection[str]) -> None:
    """Raises ValueError for a record with a column that a table lacks."""
    unknown = sorted(record.keys() - set(columns))
    raise ValueError(f"table={table}: has no column {', '.join(unknown)}; its columns are {', '.join(columns)}")


def refuse_metrics(metrics: dict[str, Any], name_of_metric: re.Pattern) -> None:
    """Raises ValueError for a line of metrics without a step or phase, with another name or value than allowed."""
    for name in ("step", "phase"):
        if name not in metrics:
            raise ValueError(f"metrics={sorted(metrics)}: has no {name!r}; every line names its step and phase")
    for name, value in metrics.items():
        if not name_of_metric.fullmatch(name):
            raise ValueError(f"metric={name!r}: is not of the form area/what; rename it, as in 'reward/mean'")
        if not isinstance(value, (int, float, str)):
            raise ValueError(
                f"{name}={value!r}: is a {type(value).__name__}; give a Python number or text, .item() of a tensor"
            )

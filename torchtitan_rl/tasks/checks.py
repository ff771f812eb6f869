"""The names of splits, and what an index or a name that is no task's is told."""

from __future__ import annotations

from typing import Any

__all__ = ["SPLITS", "check_index", "check_split"]

SPLITS = ("train", "validation", "test")


def check_split(split: str) -> None:
    """Raises ValueError unless `split` is one of `SPLITS`."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: is not a split; use one of {', '.join(SPLITS)}")


def check_index(family: Any, split: str, index: int) -> None:
    """Raises IndexError unless the split has a task of this index, ValueError if there is no such split."""
    check_split(split)
    num_tasks = family.num_tasks(split)
    if index < 0 or (num_tasks is not None and index >= num_tasks):
        size = "no end" if num_tasks is None else f"{num_tasks} tasks"
        raise IndexError(f"index={index}: {family.name} has {size} in {split}, counted from 0; use an index within")

"""Splits of a table of rows: drawn by a seed, and the rows that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_rl.tasks.family import SPLITS, stable_hash

__all__ = ["SplitOverlap", "draw", "num_duplicates", "overlaps"]


@dataclass(kw_only=True, slots=True)
class SplitOverlap:
    """Rows of one split whose prompt a split held out from it has too."""

    split: str
    held_out: str
    positions: list[int]
    """Of the rows within `split`."""


def draw(keys: list[int], fractions: Mapping[str, float], seed: int) -> dict[str, list[int]]:
    """Positions of the rows of each split in `fractions` (split -> share of the different keys); the rest is train.

    Rows with the same key stay together, so drawn splits have none in common. A hash of seed and key decides: the order
    of rows does not matter, and most rows keep their split when rows are added.
    Raises ValueError where a split would be without rows.
    """
    order = sorted(set(keys), key=lambda key: stable_hash(seed, "draw", key))
    split_of, first = {}, 0
    for split, fraction in fractions.items():
        last = first + max(1, round(fraction * len(order)))
        split_of.update(dict.fromkeys(order[first:last], split))
        first = last
    if first >= len(order):
        shares = ", ".join(f"dataset.{split}_fraction={fraction}" for split, fraction in fractions.items())
        raise ValueError(f"{shares}: leave no train rows of {len(order)} different prompts; lower them or add rows")
    drawn: dict[str, list[int]] = {split: [] for split in ("train", *fractions)}
    for position, key in enumerate(keys):
        drawn[split_of.get(key, "train")].append(position)
    return drawn


def num_duplicates(keys: list[int]) -> int:
    """Rows whose key an earlier row has."""
    return len(keys) - len(set(keys))


def overlaps(keys: Mapping[str, list[int]]) -> list[SplitOverlap]:
    """The rows of each split whose prompt a later one of train, validation and test has too."""
    shared = []
    for number, split in enumerate(SPLITS):
        for held_out in SPLITS[number + 1 :]:
            later_keys = set(keys[held_out])
            positions = [position for position, key in enumerate(keys[split]) if key in later_keys]
            if positions:
                shared.append(SplitOverlap(split=split, held_out=held_out, positions=positions))
    return shared

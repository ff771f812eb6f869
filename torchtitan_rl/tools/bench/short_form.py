"""The short form of the bench: its ratios beside those that are stored, so that a change that costs speed is seen.

`short_ratios.json` holds, of a machine with two cores, the ratio of each measurement to its floor, and by which factor
a ratio may be lower. Both sides of a ratio slow down together on a slower machine, so the ratios travel, as far as
machines are alike.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.tools.bench.measurement import Measurement
from torchtitan_rl.tools.bench.workload import Lengths

__all__ = ["SHORT_TRAINING", "stored_ratios", "worse_than_stored"]

SHORT_TRAINING: tuple[Lengths, ...] = ("skewed",)
"""The lengths of training in the short form, for want of time."""
FILE = Path(__file__).parent / "short_ratios.json"


def stored_ratios() -> tuple[float, dict[str, float]]:
    """The margin, a share of the stored ratio, and the ratios by the names of measurements."""
    stored = json.loads(FILE.read_text())
    return stored["margin"], stored["ratios"]


def worse_than_stored(measurements: Sequence[Measurement]) -> list[str]:
    """A line for each measurement whose ratio is lower than the stored one by more than the margin."""
    margin, ratios = stored_ratios()
    lines = []
    for measurement in measurements:
        stored = ratios[measurement.name]
        least = stored * (1 - margin)
        if measurement.ratio < least:
            lines.append(
                f"{measurement.name}: {measurement.ratio:.2f} of {measurement.floor}'s speed; stored is {stored:.2f}, "
                f"less {margin:.0%} is {least:.2f}; look for what made it slower, or store another ratio in "
                f"{FILE.name} and say why"
            )
    return lines

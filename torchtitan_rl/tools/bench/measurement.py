"""What a bench has measured: the repeats of each side, and the arithmetic on them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

__all__ = ["OURS", "OURS_COMPILED", "Measurement", "Repeat", "interval"]

OURS, OURS_COMPILED = "ours", "ours compiled"
"""The names of this package's sides: of its generator eager, or of whatever else is measured, and of a compiled one."""
_OUR_SIDES = OURS, OURS_COMPILED


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeat:
    """One piece of work that a side has done."""

    seconds: float
    amount: int
    """How much was done: tokens, or bytes."""
    step: int = 0
    """The number of the repeat on the side's timeline; 0: the side records none."""
    cpu_s: float = 0.0
    """Processor seconds of the process that drives the side; 0: not measured."""


@dataclass(kw_only=True, slots=True)
class Measurement:
    """The same work by all sides, in turn: repeat i of every side was made in the same round."""

    name: str
    """Such as `generate 3m float32 fixed`."""
    unit: str
    """Of the repeats' amounts: `tokens`, or `bytes`."""
    sides: dict[str, list[Repeat]]
    """Name of a side -> its repeats; `ours`, perhaps `ours compiled`, and at least one floor."""
    parts: dict[str, float] = field(default_factory=dict)
    """Of `best`, the mean seconds of a repeat by what it waited for."""

    def seconds(self, side: str) -> float:
        """The median over the repeats."""
        return median(repeat.seconds for repeat in self.sides[side])

    def rate(self, side: str) -> float:
        """The median over the repeats of amount per second."""
        return median(repeat.amount / repeat.seconds for repeat in self.sides[side])

    @property
    def best(self) -> str:
        """The fastest of our sides."""
        return max((side for side in self.sides if side in _OUR_SIDES), key=self.rate)

    @property
    def floor(self) -> str:
        """The fastest of the other sides."""
        return max(self._floors, key=self.rate)

    @property
    def _floors(self) -> list[str]:
        return [side for side in self.sides if side not in _OUR_SIDES]

    def ratios(self, side: str) -> list[float]:
        """Of each round, the amount per second of `best` over that of another side: 1 is as fast, 0.5 half as fast."""
        pairs = zip(self.sides[self.best], self.sides[side], strict=True)
        return [(ours.amount / ours.seconds) / (other.amount / other.seconds) for ours, other in pairs]

    @property
    def ratio(self) -> float:
        """The median of the ratios to the floor."""
        return median(self.ratios(self.floor))

    def as_data(self) -> dict[str, Any]:
        sides = {
            side: {
                "median_s": self.seconds(side),
                "seconds": [repeat.seconds for repeat in repeats],
                f"{self.unit}_per_s": self.rate(side),
                self.unit: repeats[0].amount,
            }
            for side, repeats in self.sides.items()
        }
        for side in self._floors:
            ratios = self.ratios(side)
            low, high = interval(ratios)
            sides[side] |= {"ratio": median(ratios), "ratio_low": low, "ratio_high": high, "ratios": ratios}
        names = {"name": self.name, "best": self.best, "floor": self.floor}
        return names | {"sides": sides, "ratio": self.ratio, "parts_s": self.parts}

    def lines(self) -> list[str]:
        """The measurement for a person."""
        lines, width = [self.name], max(map(len, self.sides))
        for side, repeats in self.sides.items():
            seconds = [repeat.seconds for repeat in repeats]
            spread = f"({min(seconds):.3f} to {max(seconds):.3f})"
            lines.append(f"  {side:{width}}  {self.seconds(side):8.3f} s {spread:20}  {self._rate_text(side)}")
        for side in sorted(self._floors, key=self.rate, reverse=True):
            ratios = self.ratios(side)
            low, high = interval(ratios)
            lines.append(f"  {self.best} / {side}, by speed: {median(ratios):.2f} ({low:.2f} to {high:.2f})")
        total = sum(self.parts.values())
        lines += [f"    {seconds:8.3f} s {seconds / total:6.1%}  {part}" for part, seconds in self.parts.items()]
        return lines

    def _rate_text(self, side: str) -> str:
        if self.unit == "bytes":
            return f"{self.rate(side) / 1e9:8.2f} GB/s"
        return f"{self.rate(side):8,.0f} {self.unit}/s"


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """95% percentile bootstrap interval of the median. Of few ratios it is little narrower than their range."""
    source, draws = random.Random(0), 10_000
    medians = sorted(median(source.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]

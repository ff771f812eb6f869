"""One batch: the groups to train on, and the groups that filters left out."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_rl.run.draws import Draw
from torchtitan_rl.run.ends import Ended
from torchtitan_rl.types import RolloutGroup

__all__ = ["Batch", "NothingToTrainOn"]


@dataclass(kw_only=True, slots=True)
class Batch:
    """The groups that were rolled out for one batch."""

    draws: list[Draw] = field(default_factory=list)
    """The draws that were rolled out, replacements included."""
    groups: list[RolloutGroup] = field(default_factory=list)
    """The groups to train on."""
    left_out: list[RolloutGroup] = field(default_factory=list)
    """The groups and rollouts that filters left out, for records."""
    sampled: list[RolloutGroup] = field(default_factory=list)
    """All groups, as they were before the filters, for metrics."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`filter/...` of the filters that are on."""


class NothingToTrainOn(Ended):
    """The filters left no group of `batch` to train on."""

    def __init__(self, message: str, batch: Batch) -> None:
        super().__init__(message)
        self.batch = batch

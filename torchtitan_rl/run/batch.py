"""What was rolled out for one batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchtitan_rl.types import RolloutGroup

__all__ = ["Batch", "NothingToTrainOn"]


@dataclass(kw_only=True, slots=True)
class Batch:
    """What was rolled out for one batch."""

    groups: list[RolloutGroup] = field(default_factory=list)
    """To train on."""
    left_out: list[RolloutGroup] = field(default_factory=list)
    """By the filters; for records."""
    sampled: list[RolloutGroup] = field(default_factory=list)
    """All of them as they were before the filters; for metrics."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`filter/...`, those of filters that are on."""


class NothingToTrainOn(RuntimeError):
    """Rollouts were made, and the filters left nothing of them; `left_out` has them."""

    def __init__(self, message: str, left_out: list[RolloutGroup]) -> None:
        super().__init__(message)
        self.left_out = left_out

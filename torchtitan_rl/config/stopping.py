"""Rules that end a run before its last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Interval

from torchtitan_rl.constraints import Hint

__all__ = ["StopConfig"]


@dataclass(kw_only=True, slots=True)
class StopConfig:
    """When a run ends before `controller.num_steps`. A target that is reached, or patience that is used up, ends the
    run well: with a last checkpoint and the evaluation on test tasks. A collapse ends the run with a checkpoint and
    exit status 1. Example: `StopConfig(target_accuracy=0.95, min_entropy=0.02)`."""

    evaluation: str = "validation"
    """The evaluation that `target_accuracy` and `patience` look at: `validation`, or one of `controller.eval_sets`."""
    target_accuracy: Annotated[float, Interval(ge=0, le=1), Hint("use 0 for no target")] = 0.0
    """The run ends at the first evaluation between steps with this accuracy; 0: no target."""
    patience: Annotated[int, Ge(0), Hint("use 0 to switch it off")] = 0
    """The run ends after so many evaluations in a row that are no better than the best one before; 0: no such rule."""
    min_improvement: Annotated[float, Interval(ge=0, lt=1), Hint("use 0 for any improvement")] = 0.0
    """By how much an accuracy must be above the best one before, to count as better. Acts only with `patience`."""
    min_entropy: Annotated[float, Ge(0), Hint("use 0 to switch it off")] = 0.0
    """Nats per token; a batch whose mean entropy (`policy/entropy`) is below is a sign of collapse. 0: no such rule."""
    max_no_signal: Annotated[float, Interval(ge=0, le=1), Hint("use a share of groups, or 0 to switch it off")] = 0.0
    """A batch is a sign of collapse where at least this share of its groups is without signal: all rewards of a group
    are equal (`reward/zero_std_frac`). 1: all groups; 0: no such rule."""
    collapse_batches: Annotated[int, Ge(1), Hint("use 10")] = 10
    """Batches in a row with the same sign of collapse after which the run ends."""

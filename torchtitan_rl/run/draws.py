"""Draws: which task each slot of a run gets. Draws depend on the seed and on the filters' decisions alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan_rl.types import Task

__all__ = ["Draw", "Draws"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One filling of a slot: a task to roll out. Batch b of B tasks consists of the slots b B to (b + 1) B - 1.

    Example: `Draw(slot=37, round=0, task=task).id == "37/0"`.
    """

    slot: int
    round: int
    """0 is the task that is due; r > 0 is the slot's r-th replacement, after filters left out the group before."""
    task: Task

    @property
    def id(self) -> str:
        """Names the draw's group of rollouts. The sampling streams of the rollouts follow from `id` and the run's
        seed."""
        return f"{self.slot}/{self.round}"


class Draws:
    """Hands out slots in order, each with the next task of `source`. A replacement keeps the slot that it fills."""

    def __init__(self, source: Any) -> None:
        """`source` gives the tasks of the train split; see `tasks.family.source_of`."""
        self.source = source
        self.next_slot = 0

    def next(self, n: int) -> list[Draw]:
        """Round 0 of the next `n` slots."""
        first, self.next_slot = self.next_slot, self.next_slot + n
        return [Draw(slot=first + i, round=0, task=task) for i, task in enumerate(self.source.next(n))]

    def replace(self, draws: list[Draw]) -> list[Draw]:
        """The next round of the draws' slots. Seed, slot and round determine the task.

        Raises ValueError for a source without `replacement(slot, round)`.
        """
        replacement = getattr(self.source, "replacement", None)
        if replacement is None:
            raise ValueError(
                f"task.source={type(self.source).__name__}: has no replacement(slot, round), which filters need; give "
                "it one that returns a task, or switch the filters off"
            )
        return [
            Draw(slot=draw.slot, round=draw.round + 1, task=replacement(draw.slot, draw.round + 1)) for draw in draws
        ]

    def state_dict(self) -> dict[str, Any]:
        """The next slot, and the state of the source."""
        return {"next_slot": self.next_slot, "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict()`. The source raises ValueError for a state of other data."""
        self.source.load_state_dict(state["source"])
        self.next_slot = state["next_slot"]

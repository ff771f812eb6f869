"""Draws: which task each slot of a run gets. What is drawn depends on the seed and on what filters decided, on nothing
else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan_rl.types import Task

__all__ = ["Draw", "Draws"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One task to roll out. Batch b of B tasks consists of the slots b B to (b + 1) B - 1.

    Example: `Draw(slot=37, round=0, task=task).id == "37/0"`.
    """

    slot: int
    round: int
    """0 is the slot's own task, r > 0 the r-th replacement of one that was filtered or dropped."""
    task: Task

    @property
    def id(self) -> str:
        """Names the draw's group of rollouts, and with the run's seed their sampling streams."""
        return f"{self.slot}/{self.round}"


class Draws:
    """Hands out slots in order, each with the next task of `source`, and replacements, which are no slots of their
    own."""

    def __init__(self, source: Any) -> None:
        """`source` is of the train split; see `tasks.family.source_of`."""
        self.source = source
        self.next_slot = 0

    def next(self, n: int) -> list[Draw]:
        """Round 0 of the next `n` slots."""
        first, self.next_slot = self.next_slot, self.next_slot + n
        return [Draw(slot=first + i, round=0, task=task) for i, task in enumerate(self.source.next(n))]

    def replace(self, draws: list[Draw]) -> list[Draw]:
        """The next round of these slots: tasks that follow from seed, slot and round.

        Raises ValueError for a source that cannot say them.
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
        """Where the draws stand."""
        return {"next_slot": self.next_slot, "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`. Raises ValueError for one of other data."""
        self.source.load_state_dict(state["source"])
        self.next_slot = state["next_slot"]

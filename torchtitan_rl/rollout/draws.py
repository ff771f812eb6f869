"""Draws and batches: which task each slot of a run gets, the groups of a batch, and what became of every draw.

Draws depend on the seed and on the filters' decisions alone. A draw is admitted, and then ends in one way: trained,
filtered or failed; or the run ends first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import RolloutGroup, Task
from torchtitan_rl.types.ends import Ended

__all__ = ["Draw", "Draws", "Batch", "NothingToTrainOn", "admissions", "outcomes"]


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

    def next(self, n: int, *, again: Sequence[Task] = ()) -> list[Draw]:
        """Round 0 of the next `n` slots: first the tasks `again`, of which there may be `n`, then the source's next. A
        batch source of the user's own may give tasks again (docs/extending.md)."""
        first, self.next_slot = self.next_slot, self.next_slot + n
        with span("draw tasks"):
            tasks = [*again, *self.source.next(n - len(again))]
            return [Draw(slot=first + i, round=0, task=task) for i, task in enumerate(tasks)]

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
        with span("draw tasks"):
            return [
                Draw(slot=draw.slot, round=draw.round + 1, task=replacement(draw.slot, draw.round + 1))
                for draw in draws
            ]

    def state_dict(self) -> dict[str, Any]:
        """The next slot, and the state of the source."""
        return {"next_slot": self.next_slot, "source": self.source.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict()`. The source raises ValueError for a state of other data."""
        self.source.load_state_dict(state["source"])
        self.next_slot = state["next_slot"]


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
    """All groups, as they were after the penalty of overlong rollouts and before the filters, for metrics."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What playing and filtering have counted: `filter/...`, `failure/...`, and of some sources `completion/long_...`
    and `curriculum/...`."""


class NothingToTrainOn(Ended):
    """The filters left no group of `batch` to train on."""

    def __init__(self, message: str, batch: Batch) -> None:
        super().__init__(message)
        self.batch = batch


def admissions(draws: list[Draw]) -> list[dict[str, Any]]:
    """Records of draws that begin."""
    return [{"draw": draw.id, "event": "admitted", "task_id": draw.task.id} for draw in draws]


def outcomes(batch: Batch) -> list[dict[str, Any]]:
    """Records of the ends of a batch's draws. A draw with a rollout in a group that trained is `trained`, one with
    rollouts in groups that filters left out alone is `filtered`, and one without rollouts is `failed`."""
    trained, filtered = _by_draw(batch.groups), _by_draw(batch.left_out)
    records = []
    for draw in batch.draws:
        event = "trained" if draw.id in trained else "filtered" if draw.id in filtered else "failed"
        versions = trained.get(draw.id, []) + filtered.get(draw.id, [])
        records.append(
            {
                "draw": draw.id,
                "event": event,
                "version_min": min(versions, default=None),
                "version_max": max(versions, default=None),
            }
        )
    return records


def _by_draw(groups: list[RolloutGroup]) -> dict[str, list[int]]:
    """Draw -> policy versions of its rollouts' first and last tokens. A rollout without a `group`, made by a hook,
    counts for the draw that its id begins with."""
    versions_by_draw: dict[str, list[int]] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        draw = rollout.group or "/".join(rollout.id.split("/")[:2])
        versions = [version for turn in rollout.turns for version in turn.completion.policy_versions]
        versions_by_draw.setdefault(draw, []).extend(versions[:1] + versions[-1:])
    return versions_by_draw

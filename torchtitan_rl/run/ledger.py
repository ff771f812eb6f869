"""What became of every draw. A draw is admitted, and then ends in one way: trained, filtered or failed; or the run ends
first."""

from __future__ import annotations

from typing import Any

from torchtitan_rl.run.batch import Batch
from torchtitan_rl.run.draws import Draw
from torchtitan_rl.types import RolloutGroup

__all__ = ["admissions", "ends"]


def admissions(draws: list[Draw]) -> list[dict[str, Any]]:
    """Records of draws that begin."""
    return [{"draw": draw.id, "event": "admitted", "task_id": draw.task.id} for draw in draws]


def ends(batch: Batch) -> list[dict[str, Any]]:
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
    found: dict[str, list[int]] = {}
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        draw = rollout.group or "/".join(rollout.id.split("/")[:2])
        versions = [version for turn in rollout.turns for version in turn.completion.policy_versions]
        found.setdefault(draw, []).extend(versions[:1] + versions[-1:])
    return found

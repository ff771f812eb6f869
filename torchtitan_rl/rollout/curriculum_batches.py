"""Batches of a curriculum: what each batch measures counts before the next one is drawn."""

from __future__ import annotations

from typing import Any

from torchtitan_rl.rollout.batches import SynchronousBatches
from torchtitan_rl.rollout.draws import Batch, NothingToTrainOn
from torchtitan_rl.tasks.curriculum import CurriculumSource

__all__ = ["CurriculumBatches"]


class CurriculumBatches:
    """The batches of a `BatchSource` whose draws are a curriculum's: counts the groups of each one, those that filters
    left out too. With `filters.overlong="penalty"` a rollout counts with what the penalty leaves of its reward. A group
    that a failure dropped counts nothing."""

    def __init__(self, batches: SynchronousBatches, source: CurriculumSource, *, correct_reward: float) -> None:
        """`source` is that of the draws of `batches`; `correct_reward` is `controller.correct_reward`."""
        self._batches, self._source, self._correct_reward = batches, source, correct_reward

    async def next_batch(self) -> Batch:
        """Plays and counts the next slots. Raises NothingToTrainOn, with the batch counted."""
        try:
            batch = await self._batches.next_batch()
        except NothingToTrainOn as nothing:
            self._count(nothing.batch)
            raise
        self._count(batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws, which has the counts."""
        return self._batches.state_dict()

    async def cancel(self) -> None:
        """Gives up what is being played."""
        await self._batches.cancel()

    def _count(self, batch: Batch) -> None:
        batch.metrics |= self._source.count(batch.sampled, self._correct_reward)

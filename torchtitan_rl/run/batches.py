"""The batches of a run, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.run.batch import Batch
from torchtitan_rl.run.resampling import fill_batch
from torchtitan_rl.types import RolloutGroup

__all__ = ["Batches"]


class Batches:
    """Rolls out the tasks of `source`, as many for each batch as the config says."""

    def __init__(
        self,
        config: AlgorithmConfig,
        roll_out: Callable[..., Awaitable[list[RolloutGroup]]],
        source: Any,
        *,
        max_tokens: int,
    ) -> None:
        """`roll_out` is `Controller.rollouts`; `max_tokens` the limit of a completion."""
        self._config, self._roll_out, self._source, self._max_tokens = config, roll_out, source, max_tokens

    async def next_batch(self) -> Batch:
        """Rollouts of the next tasks; where filters are on, of those that pass. Raises NothingToTrainOn."""
        counts: Counter = Counter()
        groups = await self._play(self._config.tasks_per_step, 0, counts)
        if groups and not self._config.filters.active:
            return Batch(groups=groups, sampled=groups, metrics=dict(counts))
        return await fill_batch(self._play, groups, self._config, counts, max_tokens=self._max_tokens)

    async def _play(self, num_tasks: int, first: int, counts: Counter) -> list[RolloutGroup]:
        return await self._roll_out(self._source.next(num_tasks), first=first, counts=counts)

"""The batches of a run, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.run.batch import Batch
from torchtitan_rl.run.draws import Draw, Draws
from torchtitan_rl.run.resampling import fill_batch
from torchtitan_rl.types import RolloutGroup

__all__ = ["Batches"]


class Batches:
    """Rolls out slots in order, `tasks_per_step` slots for each batch.

    The tasks of a batch depend on the seed and on the filters' decisions, not on the step that trains on the batch.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        play: Callable[[list[Draw], Counter], Awaitable[list[RolloutGroup]]],
        draws: Draws,
        *,
        max_tokens: int,
        admitted: Callable[[list[Draw]], None],
    ) -> None:
        """`play` is `Rollouts.play`; `max_tokens` is the limit of a completion; `admitted` is told of draws that are
        about to be played."""
        self._config, self._draws, self._max_tokens = config, draws, max_tokens

        def admit_and_play(draws: list[Draw], counts: Counter) -> Awaitable[list[RolloutGroup]]:
            admitted(draws)
            return play(draws, counts)

        self._play = admit_and_play

    async def next_batch(self) -> Batch:
        """Rollouts of the next slots. With filters on, or groups dropped for a failure: the groups that are left, and
        replacements for the slots of the others. Raises NothingToTrainOn."""
        filters, counts = self._config.filters, Counter()
        draws = self._draws.next(self._config.tasks_per_step)
        groups = await self._play(draws, counts)
        failed = counts["failure/dropped_groups"]
        if groups and not failed and not filters.zero_variance and filters.overlong == "keep":
            return Batch(draws=draws, groups=groups, sampled=groups, metrics=dict(counts))
        return await fill_batch(
            self._play, self._draws.replace, draws, groups, self._config, counts, max_tokens=self._max_tokens
        )

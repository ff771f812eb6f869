"""Batches of judged groups for training: what a source of batches is, and the source in which generation and training
take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.record.tracing import span
from torchtitan_rl.rollout.draws import Batch, Draw, Draws, NothingToTrainOn
from torchtitan_rl.rollout.player import RolloutPlayer
from torchtitan_rl.rollout.resampling import fill_batch
from torchtitan_rl.types import RolloutGroup
from torchtitan_rl.types.run_state import RunState

__all__ = ["BatchPlayer", "BatchSource", "SynchronousBatches"]


class BatchSource(Protocol):
    """Where the loop takes its batches from. `SynchronousBatches` plays a batch when the loop asks for it;
    `rollout.ahead.BatchesAhead` and `rollout.first_finished.FirstFinished` play batches while earlier ones train.
    `rollout.batch_sources` makes the one that a config asks for."""

    async def next_batch(self) -> Batch:
        """The groups of the next batch, played and judged. Raises NothingToTrainOn."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws before the first batch that was not handed out."""
        ...

    async def cancel(self) -> None:
        """Gives up what is being played."""
        ...


class BatchPlayer:
    """Plays draws until they make a batch: with filters on, or groups dropped for a failure, it plays replacements for
    the slots whose group was left out."""

    def __init__(
        self,
        config: AlgorithmConfig,
        rollout_player: RolloutPlayer,
        draws: Draws,
        admitted: Callable[[list[Draw], int], None],
        *,
        max_tokens: int,
    ) -> None:
        """`admitted(draws, step)` is called for draws that are about to be played, with the step after which their
        batch is to train. `max_tokens` is `sampling.max_tokens`."""
        self.config, self._rollout_player, self._draws, self._admitted = config, rollout_player, draws, admitted
        self.max_tokens = max_tokens

    async def play(self, draws: list[Draw], step: int) -> Batch:
        """The batch of `draws`, one per slot, which is to train after `step`. Raises NothingToTrainOn."""
        with span("play a batch", kind="phase"):
            counts = Counter[str]()
            groups = await self._play(draws, counts, step)
            if groups and not counts["failure/dropped_groups"] and self.config.filters.all_off:
                return Batch(draws=draws, groups=groups, sampled=groups, metrics=dict(counts))
            return await self.fill(draws, groups, counts, step)

    async def fill(self, draws: list[Draw], groups: list[RolloutGroup], counts: Counter, step: int) -> Batch:
        """Filters the `groups` of `draws` and plays replacements, as `fill_batch` says."""

        async def play(draws: list[Draw], counts: Counter) -> list[RolloutGroup]:
            return await self._play(draws, counts, step)

        replace = self._draws.replace
        return await fill_batch(play, replace, draws, groups, self.config, counts, max_tokens=self.max_tokens)

    async def _play(self, draws: list[Draw], counts: Counter, step: int) -> list[RolloutGroup]:
        self._admitted(draws, step)
        return await self._rollout_player.play(draws, counts)


class SynchronousBatches:
    """Plays slots in order, `tasks_per_step` slots and their replacements for each batch. The tasks of a batch depend
    on the seed and on the filters' decisions, not on the step that trains on the batch."""

    def __init__(self, player: BatchPlayer, draws: Draws, state: RunState) -> None:
        self._player, self._draws, self._state = player, draws, state

    async def next_batch(self) -> Batch:
        """Plays the next slots. Raises NothingToTrainOn. Where the play is given up or fails they are due again."""
        before = self._draws.state_dict()
        try:
            return await self._player.play(self._draws.next(self._player.config.tasks_per_step), self._state.step)
        except NothingToTrainOn:  # they were played
            raise
        except BaseException:
            self._draws.load_state_dict(before)
            raise

    def state_dict(self) -> dict[str, Any]:
        return self._draws.state_dict()

    async def cancel(self) -> None:
        """Between two calls of `next_batch` nothing is being played."""

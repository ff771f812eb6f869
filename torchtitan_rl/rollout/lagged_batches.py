"""Batches that are played while earlier batches train: what the two orders of such batches share."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.rollout.batches import BatchPlayer
from torchtitan_rl.rollout.draws import Batch, Draws, NothingToTrainOn
from torchtitan_rl.rollout.finished import FinishedGroups, GroupLine
from torchtitan_rl.rollout.lag import check_lag
from torchtitan_rl.types.run_state import RunState

__all__ = ["LaggedBatches"]


class LaggedBatches(ABC):
    """Plays up to k = `algorithm.max_policy_lag` batches while another one trains. A publication of weights follows
    every batch. No token is older than k publications when its batch starts to train, and no rollout is thrown away for
    its age.

    Two implementations: `BatchesAhead` makes batches of the slots in order, `FirstFinished` of the slots that finished
    first.
    """

    def __init__(
        self,
        config: RunConfig,
        player: BatchPlayer,
        draws: Draws,
        state: RunState,
        *,
        publications: list[int],
        finished: FinishedGroups,
    ) -> None:
        """`publications` lists the published versions so far; `finished` keeps the groups that have not trained."""
        self._config, self._player, self._draws, self._state = config, player, draws, state
        self._algorithm = config.algorithm
        self._publications, self._finished = publications, finished

    async def next_batch(self) -> Batch:
        """The next batch; admits the draws of later batches. Call when the publication after the batch before is
        served. Raises NothingToTrainOn, and RuntimeError for a token that is too old."""
        try:
            with span("wait for a batch"):
                batch = await running("admit draws", self._next())
        except NothingToTrainOn as nothing:
            self._finished.forget({draw.slot for draw in nothing.batch.draws})
            raise
        self._finished.forget({draw.slot for draw in batch.draws})
        with span("check the lag"):
            check_lag(batch.groups, self._publications, self._algorithm.max_policy_lag)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws before the first batch that was not handed out; the last k + 1 `publications`, which
        may have sampled for that batch and those after it; and what these batches have played so far, `finished`."""
        before, newest = self._before(), self._publications[-self._algorithm.max_policy_lag - 1 :]
        return before | {"publications": newest, "finished": self._finished.since(before["next_slot"])}

    def resume(self, state: dict[str, Any], finished: list[GroupLine]) -> list[str]:
        """Goes on from a `state_dict()`, after `Draws.load_state_dict` and the first publication, which is of the same
        weights as the last one of the state. Returns notes for the user."""
        before, now = state.get("publications", []), self._publications[:1]
        self._publications[:0] = before[:-1] if before[-1:] == now else before
        return self._finished.restore(finished)

    async def cancel(self) -> None:
        """Gives up the batches that are being played; their slots are due again."""
        before, tasks = self._before(), self._give_up()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            self._draws.load_state_dict(before)

    @abstractmethod
    async def _next(self) -> Batch:
        """Admits draws, and waits for the next batch."""

    @abstractmethod
    def num_ready(self) -> int:
        """The batches that have been played and wait to train."""

    @abstractmethod
    def _before(self) -> dict[str, Any]:
        """The state of the draws before the first batch that was not handed out."""

    @abstractmethod
    def _give_up(self) -> list[asyncio.Task[Batch]]:
        """Leaves what is being played. Returns the tasks."""

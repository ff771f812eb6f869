"""Batches of slots in order, played while earlier batches train: `algorithm.batch_order="slots"` with a lag."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.rollout.batches import BatchPlayer
from torchtitan_rl.rollout.draws import Batch, Draws, NothingToTrainOn
from torchtitan_rl.rollout.finished import FinishedGroups
from torchtitan_rl.rollout.lagged_batches import LaggedBatches
from torchtitan_rl.types.run_state import RunState

__all__ = ["BatchesAhead"]


class BatchesAhead(LaggedBatches):
    """Draws of batch b are admitted once the publication that follows batch b - k - 1 is served, so long rollouts train
    as often as short ones."""

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
        super().__init__(config, player, draws, state, publications=publications, finished=finished)
        self._playing: deque[tuple[asyncio.Task[Batch], dict[str, Any]]] = deque()
        """The batches that are being played, in order, each with the state of the draws before the batch."""

    async def _next(self) -> Batch:
        algorithm, step = self._algorithm, self._state.step
        # Batch b is asked for once the publication after batch b - 1 is served. Then b to b + k are played: batch b + k
        # is to be admitted after the publication that follows batch (b + k) - k - 1 = b - 1.
        while len(self._playing) <= algorithm.max_policy_lag:
            begins = step + len(self._playing) * algorithm.steps_per_batch
            if self._playing and begins >= self._config.controller.num_steps:
                break
            before = self._draws.state_dict()
            draws = self._draws.next(algorithm.tasks_per_step)
            self._playing.append((asyncio.ensure_future(self._player.play(draws, begins)), before))
        playing, _ = self._playing[0]
        await asyncio.sleep(0)  # the requests of later batches leave before training begins
        try:
            batch = await asyncio.shield(playing)  # where the wait is cancelled, the next one gets the batch
        except NothingToTrainOn:
            self._playing.popleft()  # its slots have ended: a resumed run goes on after them
            raise
        self._playing.popleft()
        return batch

    def num_ready(self) -> int:
        return sum(task.done() for task, _ in self._playing)

    def _before(self) -> dict[str, Any]:
        return self._playing[0][1] if self._playing else self._draws.state_dict()

    def _give_up(self) -> list[asyncio.Task[Batch]]:
        tasks = [task for task, _ in self._playing]
        self._playing.clear()
        return tasks

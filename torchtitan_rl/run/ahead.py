"""Batches that are played while earlier batches train."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from torchtitan_rl.run.draws import Batch
from torchtitan_rl.run.lag import check_lag
from torchtitan_rl.run.training import Batches
from torchtitan_rl.types import RolloutGroup

__all__ = ["BatchesAhead"]


class BatchesAhead(Batches):
    """Plays up to k = `algorithm.max_policy_lag` batches while another one trains.

    A publication of weights follows every batch. Draws of batch b are admitted once the publication that follows batch
    b - k - 1 is served. So no token is older than k publications when its batch starts to train, no rollout is thrown
    away for its age, and long rollouts train as often as short ones. `Batches` is the case k = 0.
    """

    def __init__(self, *args: Any, publications: list[int]) -> None:
        """`publications` lists the published versions so far; the rest is as in `Batches`."""
        super().__init__(*args)
        self._publications = publications
        self._playing: deque[tuple[asyncio.Task[Batch], dict[str, Any]]] = deque()
        """The batches that are being played, in order, each with the state of the draws before the batch."""
        self.groups: list[RolloutGroup] = []
        """The groups of the batch that was handed out last."""

    async def next_batch(self) -> Batch:
        """The next batch, as `Batches` says; admits the draws of later batches. Call when the publication after the
        batch before is served."""
        algorithm, step = self._config.algorithm, self._state.step
        while len(self._playing) <= algorithm.max_policy_lag:
            begins = step + len(self._playing) * algorithm.steps_per_batch
            if self._playing and begins >= self._config.controller.num_steps:
                break
            before = self._draws.state_dict()
            draws = self._draws.next(algorithm.tasks_per_step)
            self._playing.append((asyncio.ensure_future(self._played(draws, begins)), before))
        playing, _ = self._playing.popleft()
        await asyncio.sleep(0)  # the requests of later batches leave before training begins
        batch = await playing
        self.groups = batch.groups
        batch.metrics |= check_lag(batch.groups, self._publications, algorithm.max_policy_lag)
        return batch

    def num_ready(self) -> int:
        """The batches that have been played and wait to train."""
        return sum(task.done() for task, _ in self._playing)

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws before the first batch that was not handed out: a resumed run plays that batch and
        those after it again."""
        return self._playing[0][1] if self._playing else super().state_dict()

    async def cancel(self) -> None:
        """Gives up the batches that are being played."""
        tasks = [task for task, _ in self._playing]
        self._playing.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Batches that are played while earlier batches train."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.rollout.draws import Batch
from torchtitan_rl.rollout.finished import Finished, Kept
from torchtitan_rl.rollout.lag import check_lag
from torchtitan_rl.train.evaluation_beside import EvaluationBeside
from torchtitan_rl.train.training import Batches
from torchtitan_rl.types import RolloutGroup

__all__ = ["BatchesAhead"]


class BatchesAhead(Batches):
    """Plays up to k = `algorithm.max_policy_lag` batches while another one trains.

    A publication of weights follows every batch. Draws of batch b are admitted once the publication that follows batch
    b - k - 1 is served. So no token is older than k publications when its batch starts to train, no rollout is thrown
    away for its age, and long rollouts train as often as short ones. `Batches` is the case k = 0.
    """

    def __init__(self, *args: Any, publications: list[int], finished: Finished) -> None:
        """`publications` lists the published versions so far, `finished` plays the groups; the rest is as in
        `Batches`."""
        super().__init__(*args)
        self._publications, self._finished = publications, finished
        self._playing: deque[tuple[asyncio.Task[Batch], dict[str, Any]]] = deque()
        """The batches that are being played, in order, each with the state of the draws before the batch."""
        self.beside: EvaluationBeside | None = None
        """The evaluations that are made while batches train; None: none are."""
        self.groups: list[RolloutGroup] = []
        """The groups of the batch that was handed out last."""

    async def next_batch(self) -> Batch:
        """The next batch, as `Batches` says; admits the draws of later batches. Call when the publication after the
        batch before is served. Raises EarlyEnd by `controller.stop`."""
        if self.beside is not None:
            self.beside.before_batch()
        with span("wait for a batch"):
            batch = await running("admit draws", self._next())
        self._finished.forget({draw.slot for draw in batch.draws})
        self.groups = batch.groups
        with span("check the lag"):
            batch.metrics |= check_lag(batch.groups, self._publications, self._config.algorithm.max_policy_lag)
        return batch

    async def _next(self) -> Batch:
        """Admits draws, and waits for the next batch."""
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
        return await playing

    def num_ready(self) -> int:
        """The batches that have been played and wait to train."""
        return sum(task.done() for task, _ in self._playing)

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws before the first batch that was not handed out; the last k + 1 `publications`, which
        may have sampled for that batch and those after it; and what these batches have played so far, `finished`."""
        before, newest = self._before(), self._publications[-self._config.algorithm.max_policy_lag - 1 :]
        return before | {"publications": newest, "finished": self._finished.since(before["next_slot"])}

    def resume(self, state: dict[str, Any], finished: list[Kept]) -> list[str]:
        """Goes on from a `state_dict()`, after `Draws.load_state_dict` and the first publication, which is of the same
        weights as the last one of the state. Returns what a user wants to know."""
        before, now = state.get("publications", []), self._publications[:1]
        self._publications[:0] = before[:-1] if before[-1:] == now else before
        return self._finished.restore(finished)

    def _before(self) -> dict[str, Any]:
        """The state of the draws before the first batch that was not handed out."""
        return self._playing[0][1] if self._playing else super().state_dict()

    def _give_up(self) -> list[asyncio.Task[Batch]]:
        """Leaves what is being played. Returns the tasks."""
        tasks = [task for task, _ in self._playing]
        self._playing.clear()
        return tasks

    async def cancel(self) -> None:
        """Gives up the batches that are being played, whose slots are due again, and the evaluations beside."""
        before, tasks = self._before(), self._give_up()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.beside is not None:
            await self.beside.cancel()
        if tasks:
            self._draws.load_state_dict(before)

"""Batches of the slots that finished first: `algorithm.batch_order="finished"`."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.rollout.batches import BatchPlayer
from torchtitan_rl.rollout.draws import Batch, Draws, NothingToTrainOn
from torchtitan_rl.rollout.finished import FinishedGroups, GroupLine
from torchtitan_rl.rollout.lagged_batches import LaggedBatches
from torchtitan_rl.types import RolloutGroup
from torchtitan_rl.types.run_state import RunState

__all__ = ["FirstFinished", "joined", "one_slot"]


@dataclass(kw_only=True, slots=True, eq=False)
class _Slot:
    """A slot that is being played, or has been and waits to train."""

    slot: int
    due: int
    """The last batch that may train the slot: k batches after the one that was next when the slot was admitted."""
    before: dict[str, Any]
    """The state of the draws before the slot."""
    task: asyncio.Task[Batch]
    """The slot's groups, replacements included, as a batch of one slot."""


class FirstFinished(LaggedBatches):
    """Keeps (1 + k // 2) B slots in flight, k being `algorithm.max_policy_lag` and B `tasks_per_step`, and makes a
    batch of the B slots that have finished first.

    A slot is due in batch b + k, where b was next when the slot was admitted: then its oldest token is k publications
    old. `_last_due` sees to it that before every batch at most i B slots are due in the next i batches, for every i. So
    every slot trains, and in time.
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
        slot_player: BatchPlayer,
        recorded: Sequence[list[int]] = (),
    ) -> None:
        """`slot_player` plays one slot at a time, see `one_slot`. `recorded` are the slots of the first batches, where
        a replay follows a record."""
        super().__init__(config, player, draws, state, publications=publications, finished=finished)
        self._recorded = deque(recorded)
        self._slot_player = slot_player
        self._slots: dict[int, _Slot] = {}
        """The slots in flight, by number, in order."""
        self._done: list[_Slot] = []
        """Those of `_slots` that have finished, in the order in which they did."""
        self._more = asyncio.Event()
        """Set when another one has finished."""
        self._batch = 0
        """The number of the next batch, counted from the first one of this attempt at the run."""
        self._due_batches: dict[int, int] = {}
        """The slots that were in flight at the checkpoint, or at `cancel`, and the batch in which each is due."""
        self._first_new_slot = 0
        """Slots below this one were admitted before; those of them that are not in `_due_batches` have trained."""
        self._num_long_played, self._num_played = 0, 0

    async def _next(self) -> Batch:
        self._admit()
        await asyncio.sleep(0)  # the requests leave before training begins
        chosen = sorted(await self._first(), key=lambda slot: slot.slot)
        batches = [_played(slot) for slot in chosen]
        for slot in chosen:
            del self._slots[slot.slot]
        self._done = [slot for slot in self._done if slot.slot in self._slots]
        self._batch += 1
        batch = joined(batches)
        if not batch.groups:
            batch = await self._further_rounds(batch)
        num_long, num = self._num_long(batch.sampled)
        batch.metrics["completion/long_frac"] = num_long / max(1, num)
        batch.metrics["completion/long_played_frac"] = self._num_long_played / max(1, self._num_played)
        return batch

    def _admit(self) -> None:
        """Admits slots until as many are in flight as may be, or as the run will train on."""
        algorithm, step = self._algorithm, self._state.step
        num_batches = math.ceil((self._config.controller.num_steps - step) / algorithm.steps_per_batch)
        max_in_flight = max(1, min(1 + algorithm.max_policy_lag // 2, num_batches)) * algorithm.tasks_per_step
        while len(self._slots) < max_in_flight:
            before = self._draws.state_dict()
            [draw] = self._draws.next(1)
            if draw.slot < self._first_new_slot and draw.slot not in self._due_batches:
                continue
            due = self._due_batches.pop(draw.slot, self._batch + algorithm.max_policy_lag)
            begins = step + (due - self._batch) * algorithm.steps_per_batch
            playing = asyncio.ensure_future(self._slot_player.play([draw], begins))
            slot = _Slot(slot=draw.slot, due=due, before=before, task=playing)
            playing.add_done_callback(partial(self._has_finished, slot))
            self._slots[slot.slot] = slot

    def _has_finished(self, slot: _Slot, played: asyncio.Task[Batch]) -> None:
        if self._slots.get(slot.slot) is slot:  # and not given up
            self._done.append(slot)
            self._more.set()
            if not played.cancelled() and isinstance(played.exception(), NothingToTrainOn | None):
                num_long, num = self._num_long(_played(slot).sampled)
                self._num_long_played, self._num_played = self._num_long_played + num_long, self._num_played + num

    def _num_long(self, groups: list[RolloutGroup]) -> tuple[int, int]:
        """(rollouts with at least half of `sampling.max_tokens` tokens, all rollouts)."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        lengths = [sum(len(turn.completion.tokens) for turn in rollout.turns) for rollout in rollouts]
        return sum(2 * length >= self._player.max_tokens for length in lengths), len(lengths)

    async def _first(self) -> list[_Slot]:
        """The slots of the next batch: those that finished first among the slots that `_last_due` leaves."""
        if self._recorded:
            return await self._as_recorded(self._recorded.popleft())
        chosen: list[_Slot] = []
        waiting: dict[int, deque[tuple[int, _Slot]]] = defaultdict(deque)
        """Batch -> the slots that are due in it and have finished, each with its place in `_done`."""
        due, num_seen = Counter(slot.due for slot in self._slots.values()), 0
        while len(chosen) < self._algorithm.tasks_per_step:
            for slot in self._done[num_seen:]:
                waiting[slot.due].append((num_seen, slot))
                num_seen += 1
            last_due = self._last_due(due, self._algorithm.tasks_per_step - len(chosen))
            heads = [(slots[0][0], batch) for batch, slots in waiting.items() if slots and batch <= last_due]
            if heads:
                _, batch = min(heads)
                chosen.append(waiting[batch].popleft()[1])
                due[batch] -= 1
            else:
                self._more.clear()
                await self._more.wait()
        return chosen

    async def _as_recorded(self, slots: list[int]) -> list[_Slot]:
        """These slots, once they have finished."""
        while len(chosen := [slot for slot in self._done if slot.slot in slots]) < len(slots):
            self._more.clear()
            await self._more.wait()
        return chosen

    def _last_due(self, due: Counter[int], room: int) -> float:
        """The latest batch a slot may be due in to join the next batch, which has room for so many (earliest deadline
        first). `due` counts the slots in flight by the batch in which they are due. Of those due by i batches after the
        next one, i batches can train after it; where as many as there is room for are left, only these may join."""
        for i in range(self._algorithm.max_policy_lag + 1):
            num = sum(number for batch, number in due.items() if batch <= self._batch + i)
            if num - i * self._algorithm.tasks_per_step >= room:
                return self._batch + i
        return math.inf

    async def _further_rounds(self, batch: Batch) -> Batch:
        """Plays its slots again for a batch without a group, as `fill_batch` says. Raises NothingToTrainOn."""
        newest_draws = list({draw.slot: draw for draw in batch.draws}.values())
        batch.metrics.pop("filter/missing_tasks", None)
        try:
            replacements = await self._player.fill(newest_draws, [], Counter(), self._state.step)
        except NothingToTrainOn as nothing:
            nothing.batch.draws = nothing.batch.draws[len(newest_draws) :]
            nothing.batch = joined([batch, nothing.batch])
            raise
        replacements.draws = replacements.draws[len(newest_draws) :]
        return joined([batch, replacements])

    def num_ready(self) -> int:
        return len(self._done) // self._algorithm.tasks_per_step

    def state_dict(self) -> dict[str, Any]:
        """As of `LaggedBatches`, before the oldest slot in flight; with `in_flight`, pairs of a slot and the batches
        until it is due, and `admitted`, the number of slots that were admitted. The others have trained."""
        due = {slot.slot: slot.due for slot in self._slots.values()} | self._due_batches
        in_flight = [[slot, batch - self._batch] for slot, batch in sorted(due.items())]
        admitted = max(self._draws.next_slot, self._first_new_slot)
        return super().state_dict() | {"in_flight": in_flight, "admitted": admitted}

    def resume(self, state: dict[str, Any], finished: list[GroupLine]) -> list[str]:
        self._expect_again(state)
        return super().resume(state, finished)

    def _before(self) -> dict[str, Any]:
        return next(iter(self._slots.values())).before if self._slots else self._draws.state_dict()

    def _give_up(self) -> list[asyncio.Task[Batch]]:
        state, tasks = self.state_dict(), [slot.task for slot in self._slots.values()]
        self._slots, self._done = {}, []
        self._expect_again(state)
        return tasks

    def _expect_again(self, state: dict[str, Any]) -> None:
        """Notes which slots of a state are still to be played, and the batch in which each is due."""
        self._due_batches = {slot: self._batch + left for slot, left in state["in_flight"]}
        self._first_new_slot = state["admitted"]


def one_slot(config: AlgorithmConfig) -> AlgorithmConfig:
    """The settings for playing one slot as a batch: the filters' rounds of a whole batch begin once no slot of it has a
    group."""
    filters = dataclasses.replace(config.filters, max_stalled_rounds=1)
    return dataclasses.replace(config, tasks_per_step=1, filters=filters)


def joined(batches: list[Batch]) -> Batch:
    """Batches of one slot each as one batch."""
    batch, sums, name = Batch(), Counter[str](), "filter/overlong_penalty_mean"
    for slot_batch in batches:
        batch.draws += slot_batch.draws
        batch.groups += slot_batch.groups
        batch.left_out += slot_batch.left_out
        batch.sampled += slot_batch.sampled
        weight = sum(len(group.rollouts) for group in slot_batch.sampled)  # a mean over rollouts
        sums.update({key: value * weight if key == name else value for key, value in slot_batch.metrics.items()})
    batch.metrics = dict(sums)
    if name in sums:
        batch.metrics[name] /= max(1, sum(len(group.rollouts) for group in batch.sampled))
    return batch


def _played(slot: _Slot) -> Batch:
    """The batch of a finished slot, without groups where the filters left none."""
    try:
        return slot.task.result()
    except NothingToTrainOn as nothing:
        return nothing.batch

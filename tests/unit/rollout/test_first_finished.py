"""Batches of what finished first: which slots a batch may have, the bound on their age, and that every slot trains."""

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.batch_loop import NUM_BATCHES, PER_BATCH, BatchLoop
from tests.kit.virtual_time import on_virtual_time
from torchtitan_rl.rollout.draws import Batch, Draw, NothingToTrainOn
from torchtitan_rl.rollout.first_finished import FirstFinished, joined
from torchtitan_rl.types import Rollout, RolloutGroup, Task

ALL = set(range(PER_BATCH * NUM_BATCHES))


def slots(batch):
    return [draw.slot for draw in batch.draws if draw.round == 0]


class SteeredLoop(BatchLoop):
    """A run whose draws end when the test says so; the version of their tokens is the one at their start. It runs
    `on_virtual_time`."""

    def __init__(self, lag):
        self.ends = {}
        super().__init__(lag, kind=FirstFinished)

    async def group(self, task, group_id):
        version = self.publications[-1]
        await self.ends.setdefault(int(group_id.split("/")[0]), asyncio.Event()).wait()
        group = await super().group(task, group_id)
        group.rollouts[0].turns[0].completion.policy_versions[0] = version
        return group

    async def batch(self, order=lambda slot: slot):
        """One round of the loop. As long as it waits, one more slot ends: the least in an order, once the slot before
        has been played."""
        taking = asyncio.ensure_future(super().batch())
        while not taking.done():
            await asyncio.sleep(1.0)  # the clock jumps: whatever else can happen has happened
            left = [slot for slot, end in self.ends.items() if not end.is_set()]
            if not taking.done() and left:
                self.ends[min(left, key=order)].set()
        return await taking


@settings(deadline=None)
@given(lag=st.integers(2, 6), seed=st.integers(0, 2**16))
@on_virtual_time
async def test_every_slot_trains_once_and_in_time(lag, seed):
    run = BatchLoop(lag, seed, bad=["1/0", "5/0", "5/1", "9/0", "9/1", "9/2", "9/3"], kind=FirstFinished)
    batches = await run.all()
    assert all(len(slots(batch)) == PER_BATCH for batch in batches)
    assert Counter(slot for batch in batches for slot in slots(batch)) == Counter(ALL)
    assert max(run.lags) <= lag
    rounds = {draw.slot: draw.round for batch in batches for draw in batch.draws}  # the last one of each slot
    assert [rounds[slot] for slot in (0, 1, 5, 9)] == [0, 1, 2, 3]
    trained = {group.id for batch in batches for group in batch.groups}
    assert trained == {f"{slot}/{rounds[slot]}" for slot in ALL - {9}}  # slot 9 has used up its rounds
    assert sum(batch.metrics["filter/missing_tasks"] for batch in batches) == 1
    assert sum(batch.metrics["filter/resampled_tasks"] for batch in batches) == 1 + 2 + 3
    flying = 0
    for kind, step, _, ids in run.events:
        if kind == "admitted":
            flying += sum(draw.endswith("/0") for draw in ids)
            assert flying <= (1 + lag // 2) * PER_BATCH and step >= run.state.step - NUM_BATCHES
        else:
            flying -= PER_BATCH


@on_virtual_time
async def test_a_long_slot_waits_until_it_is_due_and_is_waited_for_then():
    run = SteeredLoop(lag=2)
    order = lambda slot: (slot == 0, slot)  # noqa: E731
    batches = [await run.batch(order) for _ in range(4)]
    assert [slots(batch) for batch in batches] == [[1, 2, 3], [4, 5, 6], [0, 7, 8], [9, 10, 11]]
    assert run.ends[0].is_set()
    await run.batches.cancel()


@pytest.mark.parametrize("lag", range(2, 8))
@on_virtual_time
async def test_no_slot_comes_too_late_where_the_newest_end_first(lag):
    run = SteeredLoop(lag)
    batches = [await run.batch(lambda slot: -slot) for _ in range(NUM_BATCHES)]
    assert max(run.lags) <= lag
    assert {slot for batch in batches for slot in slots(batch)} == ALL


@settings(deadline=None)
@given(lag=st.integers(2, 5), seed=st.integers(0, 2**16), stop_after=st.integers(1, 5))
@on_virtual_time
async def test_a_resumed_run_loses_no_slot_and_plays_none_again(lag, seed, stop_after):
    async def resumed(run, state, lines):
        again = BatchLoop(lag, seed + 1, bad=["1/0"], start=(stop_after, state), kind=FirstFinished)
        again.publications[:] = run.publications[-1:]
        again.batches.resume(state, lines)
        now = again.batches.state_dict()
        assert now.pop("finished") == lines and now == state
        return again, await again.all()

    run = BatchLoop(lag, seed, bad=["1/0"], kind=FirstFinished)
    trained = [slots(await run.batch()) for _ in range(stop_after)]
    state = run.batches.state_dict()
    lines, state = json.loads(json.dumps(state.pop("finished"))), json.loads(json.dumps(state))
    await run.batches.cancel()
    before = [slot for batch in trained for slot in batch]
    in_flight = [slot for slot, _ in state["in_flight"]]
    assert sorted(before + in_flight) == list(range(state["admitted"])) and state["next_slot"] == min(in_flight)
    again, batches = await resumed(run, state, lines)
    assert Counter(before + [slot for batch in batches for slot in slots(batch)]) == Counter(ALL)
    assert max(run.lags + again.lags) <= lag
    assert not {line["draw"] for line in lines} & set(again.played)


@on_virtual_time
async def test_slots_that_were_given_up_are_due_again():
    run = SteeredLoop(lag=2)
    await run.batch(lambda slot: -slot)  # trains 5, 4, 3
    await run.batches.cancel()
    assert run.draws.next_slot == 0
    run.ends.clear()
    left = [slots(await run.batch()) for _ in range(2)]
    assert left == [[0, 1, 2], [6, 7, 8]]
    await run.batches.cancel()


def test_a_batch_has_the_sums_and_means_of_its_slots():
    def one(slot, num_rollouts, **metrics):
        task = Task(id=str(slot), prompt="")
        rollouts = [Rollout(id=f"{slot}/0/{i}", task=task, turns=[], reward=1.0) for i in range(num_rollouts)]
        group = [RolloutGroup(id=f"{slot}/0", rollouts=rollouts)]
        penalty = {"filter/overlong_penalty_mean": metrics.pop("penalty")}
        return Batch(
            draws=[Draw(slot=slot, round=0, task=task)], groups=group, sampled=group, metrics=metrics | penalty
        )

    batch = joined([one(3, 2, resampled=1, penalty=0.5), one(4, 6, resampled=2, penalty=0.1)])
    assert batch.metrics == {"resampled": 3, "filter/overlong_penalty_mean": pytest.approx((2 * 0.5 + 6 * 0.1) / 8)}
    assert [draw.slot for draw in batch.draws] == [3, 4] and len(batch.groups) == len(batch.sampled) == 2


async def test_a_batch_without_a_group_plays_its_slots_again():
    in_flight, rounds = range(2 * PER_BATCH), range(6)  # max_resamples=3 ends the rounds of a slot by itself at round 3
    run = BatchLoop(2, bad=[f"{slot}/{round}" for slot in in_flight for round in rounds], kind=FirstFinished)
    batch = await run.batch()
    assert sorted(group.id for group in batch.groups) == sorted(f"{slot}/6" for slot in slots(batch))
    assert [draw.round for draw in batch.draws] == [0, 1, 2, 3] * 3 + [4] * 3 + [5] * 3 + [6] * 3
    assert batch.metrics["filter/resampled_tasks"] == 6 * 3 and batch.metrics["filter/missing_tasks"] == 0
    assert batch.metrics["filter/zero_variance_groups"] == 6 * 3 and len(batch.left_out) == 6 * 3

    run = BatchLoop(2, bad=[f"{slot}/{round}" for slot in in_flight for round in range(99)], kind=FirstFinished)
    with pytest.raises(NothingToTrainOn, match="max_stalled_rounds=10: 10 rounds with 27 groups left") as ended:
        await run.batch()
    draws = [draw.id for draw in ended.value.batch.draws]
    assert len(draws) == len(set(draws)) == 3 * 4 + 3 * 9 == len(ended.value.batch.left_out)


@on_virtual_time
async def test_the_share_of_long_rollouts_is_told_of_the_batch_and_of_all_that_were_played():
    run = SteeredLoop(lag=2)
    run.batches._player.max_tokens = 4  # long: two tokens or more
    batches = [await run.batch() for _ in range(3)]
    played = [slot for slot, end in run.ends.items() if end.is_set()]
    for batch in batches:
        lengths = [len(r.turns[0].completion.tokens) for group in batch.sampled for r in group.rollouts]
        assert batch.metrics["completion/long_frac"] == sum(length >= 2 for length in lengths) / len(lengths)
    shares = [batch.metrics["completion/long_frac"] for batch in batches]
    assert batches[-1].metrics["completion/long_played_frac"] == pytest.approx(sum(shares) / 3)
    assert len(played) == 3 * PER_BATCH
    await run.batches.cancel()


async def test_slots_whose_groups_were_all_filtered_count_among_the_rollouts_played():
    run = BatchLoop(2, bad=[f"0/{round}" for round in range(99)], kind=FirstFinished)
    while 0 not in slots(await run.batch()):
        pass
    await asyncio.sleep(0.05)  # until all that is in flight has been played
    assert "0/0" in run.played and run.batches._num_played == 2 * len(run.played)

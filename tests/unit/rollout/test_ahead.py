"""Batches ahead of training: which draws are admitted when, and what is true of every order in which rollouts end."""

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.batch_loop import NUM_BATCHES, PER_BATCH, BatchLoop
from tests.kit.virtual_time import on_virtual_time
from torchtitan_rl.rollout.draws import NothingToTrainOn
from torchtitan_rl.rollout.lag import age_metrics, check_lag
from torchtitan_rl.types import Task


@settings(deadline=None)
@given(lag=st.integers(0, 3), seed=st.integers(0, 2**16))
@on_virtual_time
async def test_the_composition_of_batches_does_not_depend_on_what_ends_first(lag, seed):
    run = BatchLoop(lag, seed, bad=["1/0", "5/0", "5/1"])
    batches = await run.all()
    trained = [sorted(group.id for group in batch.groups) for batch in batches]
    slots = [[f"{slot}/0" for slot in range(3 * b, 3 * b + 3)] for b in range(NUM_BATCHES)]
    slots[0][1], slots[1][2] = "1/1", "5/2"
    assert trained == [sorted(ids) for ids in slots]
    assert sorted(sum((event[3] for event in run.of("admitted")), [])) == sorted(sum(trained, ["1/0", "5/0", "5/1"]))


@settings(deadline=None)
@given(lag=st.integers(0, 3), seed=st.integers(0, 2**16))
@on_virtual_time
async def test_no_token_is_older_than_the_bound_and_nothing_is_thrown_away_for_its_age(lag, seed):
    run = BatchLoop(lag, seed)
    batches = await run.all()
    assert [len(batch.groups) for batch in batches] == [PER_BATCH] * NUM_BATCHES
    assert max(run.lags) <= lag
    for b, (_, step, _, ids) in enumerate(run.of("admitted")):  # batch b: after the publication of batch b - k - 1
        before = run.events[: run.events.index(run.of("admitted")[b])]
        assert step == b and ids == [f"{slot}/0" for slot in range(3 * b, 3 * b + 3)]
        assert sum(event[0] == "trained" for event in before) == max(0, b - lag)


async def test_a_run_that_ended_with_nothing_to_train_on_is_resumed_after_that_batch():
    bad = [f"{slot}/{round}" for slot in range(PER_BATCH, 2 * PER_BATCH) for round in range(99)]
    run = BatchLoop(1, bad=bad)
    await run.batch()
    with pytest.raises(NothingToTrainOn):
        await run.batch()
    state = run.batches.state_dict()
    assert state["next_slot"] == 2 * PER_BATCH
    assert all(int(line["draw"].split("/")[0]) >= 2 * PER_BATCH for line in state["finished"])
    await run.batches.cancel()
    assert run.draws.next_slot == 2 * PER_BATCH


async def test_no_batch_is_admitted_that_the_run_will_not_train_on():
    run = BatchLoop(lag=3)
    await run.all()
    assert len(run.of("admitted")) == NUM_BATCHES and run.draws.next_slot == PER_BATCH * NUM_BATCHES


@settings(deadline=None)
@given(lag=st.integers(1, 3), seed=st.integers(0, 2**16), stop_after=st.integers(1, 5))
@on_virtual_time
async def test_a_resumed_run_trains_on_what_had_finished_and_plays_the_rest(lag, seed, stop_after):
    async def resumed(publications, state, lines):
        run = BatchLoop(lag, seed + 1, bad=["1/0", "5/0", "5/1"], start=(stop_after, state))
        run.publications[:] = publications[-1:]  # a resumed run publishes the checkpoint's weights
        assert run.batches.resume(state, lines) == []
        assert run.publications == publications[-lag - 1 :]
        first = run.batches.state_dict()
        assert first["finished"] == lines and first["publications"] == run.publications
        return run, await run.all()

    run = BatchLoop(lag, seed, bad=["1/0", "5/0", "5/1"])
    for _ in range(stop_after):
        await run.batch()
    await asyncio.sleep(run.random.choice([0, 1e-3, 5e-3]))
    state = run.batches.state_dict()
    lines = json.loads(json.dumps(state.pop("finished")))
    state, publications = json.loads(json.dumps(state)), list(run.publications)
    await run.batches.cancel()
    assert state["next_slot"] == stop_after * PER_BATCH == run.draws.next_slot  # `cancel` has given the draws back
    again, _ = await resumed(publications, state, lines)
    assert max(run.lags + again.lags) <= lag
    trained = [sorted(event[3]) for event in run.of("trained") + again.of("trained")]
    slots = [[f"{slot}/0" for slot in range(3 * b, 3 * b + 3)] for b in range(NUM_BATCHES)]
    slots[0][1], slots[1][2] = "1/1", "5/2"
    assert trained == [sorted(ids) for ids in slots]
    kept = [line["draw"] for line in lines]
    assert sorted(kept) == sorted(draw for draw in run.played if int(draw.split("/")[0]) >= state["next_slot"])
    assert not set(kept) & set(again.played)
    assert again.batches.state_dict()["finished"] == []  # what has trained is forgotten


@pytest.mark.parametrize("lag", [0, 2])
async def test_a_resumed_run_plays_what_was_in_flight_again(lag):
    run = BatchLoop(lag)
    for step in range(3):
        await run.batch()
        assert run.batches.state_dict()["next_slot"] == (step + 1) * PER_BATCH
    state = run.batches.state_dict()
    await run.batches.cancel()
    assert state["next_slot"] == 3 * PER_BATCH == run.draws.next_slot
    resumed = BatchLoop(lag, start=(3, state))
    await resumed.all()
    assert [event[3] for event in run.of("trained") + resumed.of("trained")] == [
        [f"{slot}/0" for slot in range(3 * b, 3 * b + 3)] for b in range(NUM_BATCHES)
    ]


async def test_a_wait_that_is_cancelled_leaves_its_batch_to_the_next_wait():
    run = BatchLoop(lag=1)
    waiting = asyncio.ensure_future(run.batches.next_batch())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    batches = await run.all()
    assert [group.id for group in batches[0].groups] == ["0/0", "1/0", "2/0"] and len(batches) == NUM_BATCHES


async def test_a_failure_ahead_is_raised_when_its_batch_is_due_and_cancel_waits_for_no_one():
    run = BatchLoop(lag=2)
    play = run.play

    async def fails_in_the_second(draws, counts):
        if draws[0].slot == 3:
            raise ValueError("reward=2")
        if draws[0].slot == 6:
            await asyncio.sleep(1000)
        return await play(draws, counts)

    run.batches._player._rollout_player.play = fails_in_the_second
    await run.batch()
    with pytest.raises(ValueError, match="reward=2"):
        await run.batch()
    await asyncio.wait_for(run.batches.cancel(), 1)
    assert run.batches.state_dict()["next_slot"] == run.draws.next_slot


async def test_age_is_counted_in_publications_and_an_older_token_is_refused():
    task = Task(id="0", prompt="")
    group = await BatchLoop(lag=0).group(task, "0/0")
    for rollout in group.rollouts:
        rollout.turns[0].completion.policy_versions = [4, 6]
    check_lag([group], [0, 4, 6], 1)
    # Two optimizer steps, one publication.
    assert age_metrics([group], [0, 4, 6]) == {"policy/lag_mean": 0.5, "policy/lag_max": 1}
    check_lag([group], [4, 6, 6, 6], 3)
    assert age_metrics([group], [4, 6, 6, 6]) == {"policy/lag_mean": 1.5, "policy/lag_max": 3}
    check_lag([group], [4, 4, 6], 1)  # version 4 was published again: the same weights
    assert age_metrics([group], [4, 4, 6]) == {"policy/lag_mean": 0.5, "policy/lag_max": 1}
    message = r"rollout='0/0/0': has a token that is 2 publications old, algorithm.max_policy_lag=1"
    with pytest.raises(RuntimeError, match=message):
        check_lag([group], [4, 5, 6], 1)
    with pytest.raises(RuntimeError, match="a token that is inf publications old"):
        check_lag([group], [5, 6], 3)  # version 4 is not known
    assert age_metrics([group], [5, 6])["policy/lag_max"] == 2  # without a bound: the publications since that are known
    assert age_metrics([group], [6])["policy/lag_max"] == 1
    assert age_metrics([], [6]) == {}

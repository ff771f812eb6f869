"""Rollouts that fail: retried, dropped as a whole group, counted, and too many of them."""

import asyncio
import dataclasses
from collections import Counter

import pytest

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.rollout.episode import EnvironmentFailed
from torchtitan_rl.rollout.failures import Failures, TooManyFailures
from torchtitan_rl.rollout.group import AttemptFailed, run_group
from torchtitan_rl.rollout.sampler import SamplingFailed
from torchtitan_rl.types import Completion, Rollout, Task, Turn

TASK = Task(id="t", prompt="p", answer="a")


def failures(mode: str, **settings) -> Failures:
    return Failures(AlgorithmConfig(on_rollout_failure=mode, **settings), {})


def attempts(*outcomes: BaseException | None, log: list | None = None):
    """A workflow whose i-th call raises the i-th outcome, if that is an exception."""
    left = list(outcomes)

    async def workflow(task, policy, *, rollout_id, seed):
        if log is not None:
            log.append((rollout_id, seed))
        if (error := left.pop(0) if left else None) is not None:
            raise error
        completion = Completion(tokens=[1], logprobs=[0.0], policy_versions=[0], finish_reason="stop")
        return Rollout(id=rollout_id, task=task, turns=[Turn(prompt_tokens=[1], completion=completion)], text="x")

    return workflow


def group(workflow, retrying, reward=lambda task, texts: [1.0] * len(texts), n=2):
    return run_group(
        workflow, TASK, None, n, group_id="0/0", seed=0, reward=reward, reward_timeout_s=5, retrying=retrying
    )  # fmt: skip


async def test_a_rollout_that_fails_is_played_again_on_another_stream():
    log, counted = [], failures("retry", rollout_retries=2)
    result = await group(attempts(EnvironmentFailed("late"), None, ValueError("odd"), log=log), counted.retrying)
    assert len(result.rollouts) == 2 and counted.failed == {"environment": 1, "workflow": 1}
    assert len(log) == 4 and len({seed for _, seed in log}) == 4


async def test_a_group_whose_rollout_fails_to_the_last_is_dropped_whole():
    counted, counts = failures("retry", rollout_retries=1), Counter()
    first = group(attempts(*[EnvironmentFailed("down")] * 9), counted.retrying)
    second = group(attempts(), counted.retrying)
    (kept,) = counted.without_failed(await asyncio.gather(first, second, return_exceptions=True), counts)
    assert len(kept.rollouts) == 2
    assert counts == {"failure/environment": 4, "failure/dropped_groups": 1}
    assert counted.without_failed([kept], again := Counter()) == [kept] and not +again  # told once


async def test_drop_group_plays_nothing_twice():
    log, counted = [], failures("drop_group")
    with pytest.raises(AttemptFailed, match="down"):
        await group(attempts(RuntimeError("down"), log=log), counted.retrying)
    assert len(log) == 2  # the sibling was played to its end


@pytest.mark.parametrize("huge", [1e200, 1.7e308, -1.1e6])
@pytest.mark.parametrize("place", ["reward", "reward_parts", "turn"])
async def test_a_workflow_that_gives_a_huge_reward_has_failed(place, huge):
    async def workflow(task, policy, *, rollout_id, seed):
        rollout = await attempts()(task, policy, rollout_id=rollout_id, seed=seed)
        if place == "turn":
            rollout.turns[0].reward = huge
        else:
            setattr(rollout, place, huge if place == "reward" else {"size": huge})
        return rollout

    counted = failures("drop_group")
    with pytest.raises(
        AttemptFailed, match="algorithm.workflow: gave reward.* for task 't'; give a finite number between"
    ):
        await group(workflow, counted.retrying)
    assert counted.failed == {"workflow": 2}
    with pytest.raises(RuntimeError, match="algorithm.workflow: gave reward"):
        await group(workflow, None)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"end_reason": 7}, "gave task 't' a rollout with end_reason=7, which is no text"),
        ({"text": b"x", "reward": 1.0}, "gave task 't' a rollout with text=b'x', which is no text"),
        ({"id": 0}, "gave task 't' a rollout with id=0, which is no text"),
        ({"reward_parts": {"exact": None}}, "gave reward part 'exact' None for task 't'; give a finite number"),
    ],
)
async def test_a_workflow_that_gives_what_no_record_holds_has_failed(changes, message):
    async def workflow(task, policy, *, rollout_id, seed):
        rollout = await attempts()(task, policy, rollout_id=rollout_id, seed=seed)
        return dataclasses.replace(rollout, **changes)

    with pytest.raises(RuntimeError, match=f"algorithm.workflow: {message}"):
        await group(workflow, None)


@pytest.mark.parametrize("changes", [{"role": "the judge"}, {"reward_parts": {"in time": 1.0}}])
async def test_a_workflow_that_gives_a_name_which_no_metric_can_contain_has_failed(changes):
    async def workflow(task, policy, *, rollout_id, seed):
        rollout = await attempts()(task, policy, rollout_id=rollout_id, seed=seed)
        return dataclasses.replace(rollout, **changes)

    with pytest.raises(RuntimeError, match=r"task 't' a (role|reward part) named '(the judge|in time)', which cannot"):
        await group(workflow, None)


async def test_a_reward_that_fails_is_asked_again():
    counted, calls = failures("retry", rollout_retries=2), []

    def reward(task, texts):
        calls.append(1)
        if len(calls) < 3:
            raise OSError("judge is away")
        return [0.5] * len(texts)

    result = await group(attempts(), counted.retrying, reward)
    assert result.rewards == [0.5, 0.5] and counted.failed == {"reward": 2}


async def test_a_fault_of_the_generators_is_no_failure_of_a_rollout():
    counted = failures("drop_group")
    with pytest.raises(SamplingFailed, match="no generator is left"):
        await group(attempts(SamplingFailed("no generator is left")), counted.retrying)
    assert not counted.failed


async def test_a_fault_of_the_generators_is_raised_before_a_failed_sibling():
    counted = failures("drop_group")
    with pytest.raises(SamplingFailed, match="no generator is left"):
        await group(attempts(ValueError("odd"), SamplingFailed("no generator is left")), counted.retrying)


@pytest.mark.parametrize("raised", [asyncio.CancelledError("scope"), SystemExit("scope")])
async def test_a_workflow_that_cancels_itself_or_leaves_has_failed(raised):
    counted = failures("drop_group")
    with pytest.raises(AttemptFailed, match="scope"):
        await group(attempts(raised), counted.retrying)
    assert counted.failed == {"workflow": 1}


async def test_the_end_of_a_run_is_no_failure():
    async def waits(task, policy, *, rollout_id, seed):
        await asyncio.Event().wait()

    counted = failures("retry")
    playing = asyncio.ensure_future(group(waits, counted.retrying))
    await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not counted.failed


async def test_too_many_failures_end_the_run_with_their_causes():
    counted = failures("drop_group", max_failed_frac=0.25)

    async def call(retry):
        if counted.calls % 3 == 0:
            raise EnvironmentFailed("down")

    with pytest.raises(TooManyFailures) as caught:
        for _ in range(200):
            try:
                await counted.retrying(call, "workflow")
            except AttemptFailed:
                pass
    assert str(caught.value) == (
        "algorithm.max_failed_frac=0.25: 11 of 33 calls have failed (11 environment); the last: down"
    )


async def test_counting_goes_on_where_the_attempt_before_stopped():
    counted = {"calls": 31, "reward": 20}
    failures = Failures(AlgorithmConfig(on_rollout_failure="drop_group", max_failed_frac=0.5), counted)

    async def fail(retry):
        raise ValueError("late")

    with pytest.raises(TooManyFailures, match=r"21 of 32 calls have failed \(21 reward\); the last: late"):
        await failures.retrying(fail, "reward")
    assert counted == {"calls": 32, "reward": 21}

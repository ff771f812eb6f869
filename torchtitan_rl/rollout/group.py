"""Playing a task several times and judging the attempts together."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan_rl.metrics import A_NAME, is_name
from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.rollout.episode import environment_of
from torchtitan_rl.rollout.multi_turn import Limits, multi_turn
from torchtitan_rl.rollout.policy import Policy, single_turn
from torchtitan_rl.tasks.family import stream
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.types import A_REWARD, Rollout, RolloutGroup, Task, is_reward

if TYPE_CHECKING:  # it imports Monarch, and most runs have no such role
    from torchtitan_rl.rollout.reward_model import RewardModel

__all__ = ["raise_worst", "run_attempts", "run_group", "rollouts_of", "workflow_of", "AttemptFailed"]

Retrying = Callable[[Callable[[int], Awaitable[Any]], str], Awaitable[Any]]


class AttemptFailed(RuntimeError):
    """An attempt, or the judging of attempts, that failed after its last retry. A group that trains is dropped whole,
    because without the attempts that failed it would be biased; in an evaluation the attempt counts as wrong."""

    rollout: Rollout | None = None
    """The attempt, where it was played and its judging failed."""


async def _once(call: Callable[[int], Awaitable[Any]], stage: str) -> Any:
    return await call(0)


def workflow_of(environment: Callable, limits: Limits) -> Callable:
    """The workflow of a family with environments: `multi_turn` in what `environment(task)` returns, or `single_turn`
    where that is None."""

    async def attempt(task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout:
        env = environment_of(environment, task)
        if env is None:
            return await single_turn(task, policy, rollout_id=rollout_id, seed=seed)
        return await multi_turn(task, policy, rollout_id=rollout_id, seed=seed, env=env, limits=limits)

    return attempt


async def run_group(
    workflow: Callable,
    task: Task,
    policy: Policy,
    n: int,
    *,
    group_id: str,
    seed: int,
    reward,
    reward_timeout_s: float,
    retrying: Retrying | None = None,
    reward_model: RewardModel | None = None,
) -> RolloutGroup:
    """The rollouts of `n` attempts at one task, with rewards. `reward` is a family or a function, see
    `tasks.judging.judge`; it judges the rollouts that neither the workflow nor an environment has rewarded.

    Attempt i samples from the streams (seed, group_id, i, retry, turn), whatever else is running. `retrying(call,
    stage)` returns what `call(retry)` returns, and decides what follows a failure in the stage `workflow` or `reward`;
    None raises the failure. `reward_model` adds its scores to the rewards; None: the run has none. Raises RuntimeError
    for what `rollouts_of` refuses, and when two rollouts have one id.
    """
    attempts = await _played(workflow, task, policy, n, group_id, seed, retrying)
    raise_worst(attempts)
    rollouts = [rollout for attempt in attempts if isinstance(attempt, list) for rollout in attempt]
    if unjudged := _unjudged(rollouts, task):
        await _judge(unjudged, task, reward, reward_timeout_s, retrying)
    if reward_model is not None:
        await reward_model.judge(rollouts)
    return RolloutGroup(id=group_id, rollouts=rollouts)


def raise_worst(results: Iterable[Any]) -> None:
    """Raises the first exception of `results` that is no AttemptFailed, because it ends the run; else the first one."""
    failures = [result for result in results if isinstance(result, BaseException)]
    if failures:
        raise min(failures, key=lambda failure: isinstance(failure, AttemptFailed))


async def run_attempts(
    workflow: Callable,
    task: Task,
    policy: Policy,
    n: int,
    *,
    group_id: str,
    seed: int,
    reward,
    reward_timeout_s: float,
    retrying: Retrying | None = None,
) -> list[Rollout | AttemptFailed]:
    """`n` attempts at one task, each for itself, as evaluations count them: entry i is the first rollout of attempt i,
    with its reward, or why attempt i failed. Arguments and streams are those of `run_group`.

    The rollouts are judged in one call, as those of a group are. Where that call fails each of them is judged alone,
    and fails alone. Raises what `retrying` raises but for AttemptFailed, and what `run_group` refuses.
    """
    results: list[Rollout | AttemptFailed] = []
    for attempt in await _played(workflow, task, policy, n, group_id, seed, retrying):
        if isinstance(attempt, BaseException) and not isinstance(attempt, AttemptFailed):
            raise attempt
        results.append(attempt[0] if isinstance(attempt, list) else attempt)
    unjudged = _unjudged([result for result in results if isinstance(result, Rollout)], task)
    failures = await _failed_to_judge(
        unjudged, partial(_judge, task=task, reward=reward, timeout_s=reward_timeout_s, retrying=retrying)
    )
    return [failures.get(result.id, result) if isinstance(result, Rollout) else result for result in results]


async def _played(
    workflow: Callable, task: Task, policy: Policy, n: int, group_id: str, seed: int, retrying: Retrying | None
) -> list[list[Rollout] | BaseException]:
    """The rollouts of each attempt, or with `retrying` the attempt's failure, in the order of attempts."""

    async def played(i: int, retry: int) -> list[Rollout]:
        began = time.perf_counter()
        attempt = workflow(task, policy, rollout_id=f"{group_id}/{i}", seed=stream(seed, group_id, i, retry))
        if not inspect.iscoroutine(attempt):
            raise RuntimeError(
                f"algorithm.workflow: returned {type(attempt).__name__} for task {task.id!r} without being awaited; "
                "write it as `async def`"
            )
        attempt = await running("play rollouts", attempt)
        for rollout in (rollouts := rollouts_of(attempt, task)):
            rollout.seconds["play"], rollout.group = time.perf_counter() - began, group_id
            _check_types(rollout)
            _check_rewards(rollout)
            _check_text(rollout, policy)
            _as_floats(rollout)
        return rollouts

    patient = retrying is not None  # attempts whose siblings may fail are first played to their end
    calls = ((retrying or _once)(partial(played, i), "workflow") for i in range(n))
    return await asyncio.gather(*calls, return_exceptions=patient)


def _unjudged(rollouts: list[Rollout], task: Task) -> list[Rollout]:
    """The rollouts that neither the workflow nor an environment has rewarded. Raises RuntimeError where two of all the
    rollouts have one id."""
    if twice := [name for name, count in Counter(rollout.id for rollout in rollouts).items() if count > 1]:
        raise RuntimeError(
            f"algorithm.workflow: gave several rollouts of task {task.id!r} the id {twice[0]!r}; give each its "
            "own, such as f'{rollout_id}.judge'"
        )
    return [
        rollout
        for rollout in rollouts
        if rollout.reward is None and rollout.turns and all(turn.reward is None for turn in rollout.turns)
    ]


async def _judge(rollouts: list[Rollout], task: Task, reward, timeout_s: float, retrying: Retrying | None) -> None:
    """Sets the rewards of rollouts, in one call of the reward."""
    texts, parts, began = [rollout.text for rollout in rollouts], {}, time.perf_counter()
    with span("wait for rewards"):
        rewards = await (retrying or _once)(
            lambda retry: running("judge rollouts", judge(reward, task, texts, timeout_s, parts)), "reward"
        )
    for i, (rollout, value) in enumerate(zip(rollouts, rewards, strict=True)):
        rollout.reward, rollout.seconds["reward"] = value, time.perf_counter() - began
        rollout.reward_parts |= {name: values[i] for name, values in parts.items()}


async def _failed_to_judge(
    rollouts: list[Rollout], judged: Callable[[list[Rollout]], Awaitable[None]]
) -> dict[str, AttemptFailed]:
    """Sets the rewards of rollouts, in one call of `judged`; where that fails, in a call for each of several. Returns
    why that failed, by the id of the rollout."""
    if not rollouts:
        return {}
    try:
        await judged(rollouts)
        return {}
    except AttemptFailed as error:
        if len(rollouts) == 1:
            error.rollout = rollouts[0]
            return {rollouts[0].id: error}
    failures = await asyncio.gather(*(_failed_to_judge([rollout], judged) for rollout in rollouts))
    return {name: failure for failed in failures for name, failure in failed.items()}


def _check_types(rollout: Rollout) -> None:
    """Raises RuntimeError for a value that stands where records hold text, and is none."""
    for name in ("id", "text", "end_reason"):
        if not isinstance(value := getattr(rollout, name), str):
            raise RuntimeError(
                f"algorithm.workflow: gave task {rollout.task.id!r} a rollout with {name}={value!r}, which is no text; "
                "give a str"
            )


def _check_rewards(rollout: Rollout) -> None:
    """Raises RuntimeError for a reward, a part of a reward or a turn's reward that a workflow gave and that is none,
    and for the name of a part, count or role that no metric can contain."""
    rewards = {"reward": rollout.reward} | {f"reward of turn {i}": turn.reward for i, turn in enumerate(rollout.turns)}
    numbers = {name: number for name, number in rewards.items() if number is not None}
    numbers |= {f"reward part {name!r}": number for name, number in rollout.reward_parts.items()}
    for name, number in numbers.items():
        if not is_reward(number):
            raise RuntimeError(
                f"algorithm.workflow: gave {name} {number!r} for task {rollout.task.id!r}; give {A_REWARD}"
            )
    for kind, names in {"role": [rollout.role], "reward part": rollout.reward_parts, "count": rollout.counts}.items():
        if wrong := [name for name in names if not is_name(name)]:
            raise RuntimeError(
                f"algorithm.workflow: gave task {rollout.task.id!r} a {kind} named {wrong[0]!r}, which cannot stand in "
                f"the name of a metric; use {A_NAME}"
            )


def _check_text(rollout: Rollout, policy: Policy) -> None:
    """Raises RuntimeError for a rollout that is to be judged by its text and has none, although the policy's last turn
    said something. A last turn that says nothing may be the whole of an answer."""
    if rollout.text or rollout.reward is not None or any(turn.reward is not None for turn in rollout.turns):
        return
    if rollout.turns and policy.text(rollout.turns[-1].completion):
        raise RuntimeError(
            f"algorithm.workflow: gave task {rollout.task.id!r} a rollout without text, which the reward judges; set "
            "Rollout.text, such as policy.text(completion), or give the rollout a reward"
        )


def _as_floats(rollout: Rollout) -> None:
    """Rewards as Python's numbers: those of NumPy are no JSON, and `statistics.mean` rounds its integers."""
    rollout.reward = None if rollout.reward is None else float(rollout.reward)
    rollout.reward_parts = {name: float(number) for name, number in rollout.reward_parts.items()}
    for turn in rollout.turns:
        turn.reward = None if turn.reward is None else float(turn.reward)


def rollouts_of(attempt: Rollout | list[Rollout], task: Task) -> list[Rollout]:
    """A workflow's result as a list of rollouts. Raises RuntimeError for an empty list and for other types."""
    rollouts = attempt if isinstance(attempt, list) else [attempt]
    strangers = [each for each in rollouts if not isinstance(each, Rollout)]
    if strangers or not rollouts:
        returned = type(strangers[0] if strangers else rollouts).__name__
        raise RuntimeError(
            f"algorithm.workflow: returned {returned} for task {task.id!r}; return a Rollout, or a list of one for "
            "each role"
        )
    return rollouts

"""Playing a task several times and judging the attempts together."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from torchtitan_rl.tasks.family import stream
from torchtitan_rl.tasks.judging import judge
from torchtitan_rl.types import Rollout, RolloutGroup, Task
from torchtitan_rl.workflows.multi_turn import Limits, multi_turn
from torchtitan_rl.workflows.policy import Policy, single_turn
from torchtitan_rl.workflows.refusals import refuse_attempt, refuse_id

__all__ = ["run_group", "rollouts_of", "workflow_of", "GroupFailed"]

Tried = Callable[[Callable[[int], Awaitable[Any]], str], Awaitable[Any]]


class GroupFailed(RuntimeError):
    """A group that has to be dropped whole: without the attempts that failed it would be biased."""


async def _once(call: Callable[[int], Awaitable[Any]], stage: str) -> Any:
    return await call(0)


def workflow_of(environment: Callable, limits: Limits) -> Callable:
    """The workflow of a family with environments: `multi_turn` in what `environment(task)` returns, or `single_turn`
    where that is None."""

    async def attempt(task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout:
        env = environment(task)
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
    first_only: bool = False,
    tried: Tried | None = None,
) -> RolloutGroup:
    """The rollouts of `n` attempts at one task, with rewards. `reward` is a family or a function, see
    `tasks.judging.judge`; it judges the rollouts that neither the workflow nor an environment has rewarded.

    Attempt i samples from the streams (seed, group_id, i, retry, turn), whatever else is running. With `first_only`, as
    in evaluations, only the first rollout of an attempt counts. `tried(call, stage)` returns what `call(retry)`
    returns, and decides what follows a failure in the stage `workflow` or `reward`; None raises the failure. Raises
    RuntimeError for what `rollouts_of` refuses, and when two rollouts have one id.
    """
    patient, tried = tried is not None, tried or _once  # a group that may be dropped first plays to its end

    async def played(i: int, retry: int) -> list[Rollout]:
        began = time.perf_counter()
        attempt = await workflow(task, policy, rollout_id=f"{group_id}/{i}", seed=stream(seed, group_id, i, retry))
        for rollout in (rollouts := rollouts_of(attempt, task)):
            rollout.seconds["play"], rollout.group = time.perf_counter() - began, group_id
        return rollouts

    calls = (tried(partial(played, i), "workflow") for i in range(n))
    attempts: list = await asyncio.gather(*calls, return_exceptions=patient)
    if failed := next((attempt for attempt in attempts if isinstance(attempt, BaseException)), None):
        raise failed
    rollouts = [rollout for attempt in attempts for rollout in (attempt[:1] if first_only else attempt)]
    if twice := [name for name, count in Counter(rollout.id for rollout in rollouts).items() if count > 1]:
        refuse_id(twice[0], task)
    unjudged = [r for r in rollouts if r.reward is None and r.turns and all(turn.reward is None for turn in r.turns)]
    texts, parts, began = [rollout.text for rollout in unjudged], {}, time.perf_counter()
    if unjudged:
        rewards = await tried(lambda retry: judge(reward, task, texts, reward_timeout_s, parts), "reward")
        for i, (rollout, value) in enumerate(zip(unjudged, rewards, strict=True)):
            rollout.reward, rollout.seconds["reward"] = value, time.perf_counter() - began
            rollout.reward_parts |= {name: values[i] for name, values in parts.items()}
    return RolloutGroup(id=group_id, rollouts=rollouts)


def rollouts_of(attempt: Rollout | list[Rollout], task: Task) -> list[Rollout]:
    """A workflow's result as a list of rollouts. Raises RuntimeError for an empty list and for other types."""
    rollouts = attempt if isinstance(attempt, list) else [attempt]
    if not rollouts or not all(isinstance(rollout, Rollout) for rollout in rollouts):
        refuse_attempt(attempt, task)
    return rollouts

"""Playing a task several times and judging the attempts together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchtitan_rl.tasks.family import TaskFamily, judge, stable_hash
from torchtitan_rl.types import Rollout, RolloutGroup, Task
from torchtitan_rl.workflows.multi_turn import Limits, multi_turn
from torchtitan_rl.workflows.policy import Policy
from torchtitan_rl.workflows.single_turn import single_turn

__all__ = ["run_group", "workflow_of"]


def workflow_of(family: TaskFamily, limits: Limits) -> Callable:
    """How a family's tasks are played: in the environment that its `environment(task)` makes, or where it has no such
    method, or that gives None, in one turn."""
    environment = getattr(family, "environment", None)

    async def attempt(task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout:
        env = None if environment is None else environment(task)
        if env is None:
            return await single_turn(task, policy, rollout_id=rollout_id, seed=seed)
        return await multi_turn(task, policy, rollout_id=rollout_id, seed=seed, env=env, limits=limits)

    return attempt


async def run_group(
    workflow: Callable, task: Task, policy: Policy, n: int, *, group_id: str, seed: int, reward,
    reward_timeout_s: float,
) -> RolloutGroup:
    """`n` rollouts of one task with their rewards. `reward` is a family or a function, see `tasks.family.judge`; it
    judges those that neither the workflow nor an environment has rewarded.

    Rollout i samples from stream (seed, group_id, i), whatever else is running.
    """
    rollouts = await asyncio.gather(*(
        workflow(task, policy, rollout_id=f"{group_id}/{i}", seed=stable_hash(seed, group_id, i) >> 1)
        for i in range(n)))
    for rollout in rollouts:
        if not isinstance(rollout, Rollout):
            raise RuntimeError(
                f"algorithm.workflow: returned {type(rollout).__name__} for task {task.id!r}; return a Rollout")
    unjudged = [rollout for rollout in rollouts if rollout.reward is None
                and rollout.turns and all(turn.reward is None for turn in rollout.turns)]
    if unjudged:
        rewards = await judge(reward, task, [rollout.text for rollout in unjudged], reward_timeout_s)
        for rollout, value in zip(unjudged, rewards, strict=True):
            rollout.reward = value
    return RolloutGroup(id=group_id, rollouts=list(rollouts))

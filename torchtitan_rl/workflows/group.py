"""Playing a task several times and judging the attempts together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from torchtitan_rl.tasks.family import judge, stable_hash
from torchtitan_rl.types import RolloutGroup, Task
from torchtitan_rl.workflows.policy import Policy

__all__ = ["run_group"]


async def run_group(
    workflow: Callable, task: Task, policy: Policy, n: int, *, group_id: str, seed: int, reward, reward_timeout_s: float,
) -> RolloutGroup:
    """`n` rollouts of one task with their rewards. `reward` is a family or a function, see `tasks.family.judge`.

    Rollout i samples from stream (seed, group_id, i), whatever else is running.
    """
    rollouts = await asyncio.gather(*(
        workflow(task, policy, rollout_id=f"{group_id}/{i}", seed=stable_hash(seed, group_id, i) >> 1) for i in range(n)))
    rewards = await judge(reward, task, [rollout.text for rollout in rollouts], reward_timeout_s)
    for rollout, value in zip(rollouts, rewards, strict=True):
        rollout.reward = value
    return RolloutGroup(id=group_id, rollouts=list(rollouts))

"""How good a policy is on a split: greedy accuracy and pass@k."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from torchtitan_rl import metrics
from torchtitan_rl.config import ControllerConfig
from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.types import Task
from torchtitan_rl.workflows.group import run_group
from torchtitan_rl.workflows.policy import Policy
from torchtitan_rl.workflows.single_turn import single_turn

__all__ = ["Evaluation", "evaluate"]


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """What one evaluation measured."""

    name: str
    """Of the task family."""
    split: str
    num_tasks: int
    accuracy: float
    """Share of tasks whose greedy completion is correct."""
    k: int = 0
    pass_at_k: float | None = None
    """Chance that at least one of k samples is correct."""

    def metrics(self) -> dict:
        line = {"eval/name": self.name, "eval/split": self.split, "eval/accuracy": self.accuracy,
                "eval/num_tasks": self.num_tasks}
        return line | ({f"eval/pass_at_{self.k}": self.pass_at_k} if self.k else {})

    def summary(self) -> str:
        text = f"{self.split} accuracy {self.accuracy:.3f}"
        return text + (f", pass@{self.k} {self.pass_at_k:.3f}" if self.k else "")


async def evaluate(
    policy: Callable[[float], Policy], family: TaskFamily, split: str, num_tasks: int, *, label: str, seed: int,
    pass_at_k: int, temperature: float, config: ControllerConfig, workflow: Callable = single_turn,
) -> Evaluation:
    """Attempts the first `num_tasks` tasks of a split greedily, and with `pass_at_k` that often at `temperature`.

    `policy(temperature)` gives the policy; `label` tells the sampling streams of one evaluation from another's;
    `workflow` makes an attempt.
    """
    size = family.num_tasks(split)
    tasks = [family.task(split, i) for i in range(num_tasks if size is None else min(num_tasks, size))]

    async def attempts(n: int, at: float) -> list[list[bool]]:
        groups = await asyncio.gather(*(
            run_group(workflow, task, policy(at), n, group_id=f"{label}/{task.id}", seed=seed, reward=family,
                      reward_timeout_s=config.reward_timeout_s) for task in tasks))
        return [[reward >= config.correct_reward for reward in group.rewards] for group in groups]

    result = Evaluation(name=family.name, split=split, num_tasks=len(tasks),
                        accuracy=mean(correct for (correct,) in await attempts(1, 0.0)))
    if pass_at_k:
        sampled = await attempts(pass_at_k, temperature)
        result.k, result.pass_at_k = pass_at_k, mean(metrics.pass_at_k(pass_at_k, sum(c), pass_at_k) for c in sampled)
    return result

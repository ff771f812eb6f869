"""What a family that chooses or orders the tasks of another one leaves as it is."""

from __future__ import annotations

from typing import Any

from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.tasks.judging import Reward, reward_function
from torchtitan_rl.types import Task

__all__ = ["WrappedFamily"]


class WrappedFamily:
    """The rewards and environments of `family`. `PassRateFilter` and `Curriculum` are such families."""

    family: TaskFamily

    def reward(self, task: Task, completions: list[str]) -> Any:
        """Rewards by the family's reward function."""
        return self.reward_for(task)(task, completions)

    def reward_for(self, task: Task) -> Reward:
        """The family's reward function itself: a `cpu_bound` mark holds, and errors name the function."""
        return reward_function(self.family, task)

    def environment(self, task: Task) -> Any:
        """The environment that the family makes for the task; None for a task of one turn."""
        make = getattr(self.family, "environment", None)
        return None if make is None else make(task)

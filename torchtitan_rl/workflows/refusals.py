"""What prompts and results of workflows are refused for, in words. Each function raises."""

from __future__ import annotations

from typing import Any, NoReturn

from torchtitan_rl.types import Rollout, Task

__all__ = ["refuse_attempt", "refuse_first_prompt", "refuse_id"]


def refuse_first_prompt(task: Task, num_tokens: int, max_prompt_tokens: int) -> NoReturn:
    """Raises ValueError for a first prompt that is too long."""
    raise ValueError(
        f"task={task.id!r}: its prompt has {num_tokens} tokens, sampling.max_prompt_tokens="
        f"{max_prompt_tokens}; raise it or filter the task out"
    )


def refuse_attempt(attempt: Any, task: Task) -> NoReturn:
    """Raises RuntimeError for what a workflow returned, unless that is a rollout or a list of rollouts."""
    rollouts = attempt if isinstance(attempt, list) else [attempt]
    what = type(next((r for r in rollouts if not isinstance(r, Rollout)), rollouts)).__name__
    raise RuntimeError(
        f"algorithm.workflow: returned {what} for task {task.id!r}; return a Rollout, or a list of one for each role"
    )


def refuse_id(rollout_id: str, task: Task) -> NoReturn:
    """Raises RuntimeError for an id that several rollouts of a task have."""
    raise RuntimeError(
        f"algorithm.workflow: gave several rollouts of task {task.id!r} the id {rollout_id!r}; give each its "
        "own, such as f'{rollout_id}.judge'"
    )

"""What prompts and results of workflows are refused for, in words."""

from __future__ import annotations

from typing import Any, NoReturn

from torchtitan_rl.types import A_REWARD, Rollout, Task, is_reward

__all__ = ["check_rewards", "refuse_attempt", "refuse_first_prompt", "refuse_id"]


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


def check_rewards(rollout: Rollout) -> None:
    """Raises RuntimeError for a reward, a part of a reward or a turn's reward that a workflow gave and that is none."""
    of_turns = {f"reward of turn {i}": turn.reward for i, turn in enumerate(rollout.turns)}
    parts = {f"reward part {name!r}": number for name, number in rollout.reward_parts.items()}
    for name, number in {"reward": rollout.reward, **of_turns, **parts}.items():
        if number is not None and not is_reward(number):
            raise RuntimeError(
                f"algorithm.workflow: gave {name} {number!r} for task {rollout.task.id!r}; give {A_REWARD}"
            )


def refuse_id(rollout_id: str, task: Task) -> NoReturn:
    """Raises RuntimeError for an id that several rollouts of a task have."""
    raise RuntimeError(
        f"algorithm.workflow: gave several rollouts of task {task.id!r} the id {rollout_id!r}; give each its "
        "own, such as f'{rollout_id}.judge'"
    )

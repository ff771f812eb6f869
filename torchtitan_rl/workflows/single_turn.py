"""One prompt, one completion."""

from __future__ import annotations

from torchtitan_rl.tasks.family import stream
from torchtitan_rl.types import Rollout, Task, Turn
from torchtitan_rl.workflows.policy import Policy

__all__ = ["single_turn"]


async def single_turn(task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout:
    """Answers the task's prompt once. The reward is filled in by `run_group`."""
    tokens = policy.prompt_tokens(task)
    completion = await policy.complete(tokens, seed=stream(seed, 0))  # turn 0
    return Rollout(
        id=rollout_id,
        task=task,
        turns=[Turn(prompt_tokens=tokens, completion=completion)],
        text=policy.text(completion),
    )

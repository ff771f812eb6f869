"""Preference pairs as (prompt tokens, completion tokens)."""

from __future__ import annotations

from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.types import Task

__all__ = ["check_pair", "pair_tokens"]


def check_pair(task: Task) -> None:
    """Raises ValueError for a task without a pair, and for a pair of equal completions."""
    for part in ("chosen", "rejected"):
        if not isinstance(getattr(task, part), str):
            raise ValueError(
                f"task={task.id!r}: has no {part} completion; leave preference=None, or give its tasks `chosen` and "
                "`rejected`, for instance dataset.chosen and dataset.rejected"
            )
    if task.chosen == task.rejected:
        raise ValueError(
            f"task={task.id!r}: chosen and rejected are the same completion, {task.chosen[:60]!r}; drop the pair"
        )


def pair_tokens(task: Task, policy: Policy) -> list[tuple[list[int], list[int]]]:
    """(prompt tokens, completion tokens) of the chosen and of the rejected completion; both end with the
    end-of-sequence token. Raises ValueError as `check_pair` does, and for completions of equal tokens."""
    check_pair(task)
    prompt, tokenizer = policy.prompt_tokens(task), policy.tokenizer
    chosen, rejected = (
        [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        for text in (task.chosen, task.rejected)
    )
    if chosen == rejected:
        raise ValueError(
            f"task={task.id!r}: chosen and rejected differ in characters that the tokenizer cannot express; drop the "
            "pair, or name another tokenizer in model.assets"
        )
    return [(prompt, chosen), (prompt, rejected)]

"""Demonstrations as (prompt tokens, completion tokens), one pair per turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torchtitan_rl.rollout.group import rollouts_of
from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.types import Completion, SamplingParams, Task

__all__ = ["demonstrate"]


async def demonstrate(workflow: Callable, task: Task, policy: Policy) -> list[tuple[list[int], list[int]]]:
    """(prompt tokens, completion tokens) of each turn of a policy that answers with `task.demonstration`.

    One text ends with the end-of-sequence token. A list of texts is played through `workflow`, so a demonstration has
    the tokens of a rollout; a workflow with an attribute `imitated` names another for it. Each of its completions ends
    with the end-of-sequence token (or the template's end of a turn), unless a stop string ends it.
    Raises ValueError for a task without a demonstration, and when the environment ends before the demonstration does or
    goes on after it.
    """
    if task.demonstration is None:
        raise ValueError(f"task={task.id!r}: has no demonstration; set supervised.num_steps=0 or give the task one")
    if isinstance(task.demonstration, str):
        completion = policy.tokenizer.encode(task.demonstration, add_special_tokens=False)
        return [(policy.prompt_tokens(task), [*completion, policy.tokenizer.eos_token_id])]
    workflow = getattr(workflow, "imitated", None) or workflow
    script: Any = _DemonstrationSampler(task, policy.tokenizer)  # no Sampler: a demonstration is never scored
    rollouts = rollouts_of(
        await workflow(
            task, dataclasses.replace(policy, generator=script, stop_token_ids=[]), rollout_id=task.id, seed=0
        ),
        task,
    )
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    if len(turns) < len(task.demonstration):
        raise ValueError(
            f"task={task.id!r}: its demonstration has {len(task.demonstration)} turns, its environment ended "
            f"({rollouts[-1].end_reason}) after {len(turns)}; give as many as are played"
        )
    return [(turn.prompt_tokens, turn.completion.tokens) for turn in turns]


class _DemonstrationSampler:
    """A sampler whose completions are the texts of a demonstration, in order."""

    def __init__(self, task: Task, tokenizer) -> None:
        self.task, self.tokenizer, self.num_taken = task, tokenizer, 0

    async def sample(
        self, tokens: list[int], params: SamplingParams, *, policy_version: int | None = None
    ) -> Completion:
        texts = self.task.demonstration
        if self.num_taken == len(texts):
            raise ValueError(
                f"task={self.task.id!r}: its environment goes on after the {len(texts)} turns of its "
                "demonstration; add the turns that are missing"
            )
        text = texts[self.num_taken]
        self.num_taken += 1
        completion = self.tokenizer.encode(text, add_special_tokens=False)
        if not any(text.endswith(stop) for stop in params.stop):
            completion.append(params.stop_token_ids[0] if params.stop_token_ids else self.tokenizer.eos_token_id)
        if len(completion) > params.max_tokens:
            raise ValueError(
                f"task={self.task.id!r}: turn {self.num_taken} of its demonstration has {len(completion)} tokens, "
                f"{params.max_tokens} are left to it; raise sampling.max_tokens or max_rollout_tokens"
            )
        return Completion(
            tokens=completion,
            logprobs=[0.0] * len(completion),
            policy_versions=[0] * len(completion),
            finish_reason="stop",
        )

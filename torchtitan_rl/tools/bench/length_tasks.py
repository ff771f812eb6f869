"""Tasks that say how long completions are, so that steps of a run have the same work each time."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan_rl.rollout.policy import Policy
from torchtitan_rl.tasks.family import stream
from torchtitan_rl.tools.bench.workload import PROMPT_TOKENS
from torchtitan_rl.types import Rollout, SamplingParams, Task, Turn

__all__ = ["LengthTasks", "of_known_length", "prompt_text", "share_of_digits"]


class LengthTasks:
    """Prompts of random letters. Task i has as answer the lengths of its attempts, entry i of `lengths`, which begins
    again at its end; `lengths` may change while nothing is drawn."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        lengths: list[list[int]] = field(default_factory=list)
        """Of each task in turn, the tokens of each attempt."""

        def build(self) -> LengthTasks:
            return LengthTasks(self)

    def __init__(self, config: Config) -> None:
        self.name, self.lengths = "lengths", config.lengths

    def num_tasks(self, split: str) -> int | None:
        return None

    def task(self, split: str, index: int) -> Task:
        lengths = self.lengths[index % len(self.lengths)]
        return Task(id=f"lengths/{split}/{index}", prompt=prompt_text(index), answer=lengths)

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        return share_of_digits(completions)


def prompt_text(index: int) -> str:
    """Letters, each of them a token."""
    return "".join(random.Random(index).choices(string.ascii_lowercase, k=PROMPT_TOKENS))


def share_of_digits(completions: list[str]) -> list[float]:
    """A reward that differs between the completions of a model with random weights."""
    return [sum(map(str.isdigit, text)) / max(1, len(text)) for text in completions]


async def of_known_length(task: Task, policy: Policy, *, rollout_id: str, seed: int) -> Rollout:
    """Answers a task of `LengthTasks` with as many tokens as it says for this attempt."""
    tokens, attempt = policy.prompt_tokens(task), int(rollout_id.rsplit("/", 1)[1])
    params = SamplingParams(max_tokens=task.answer[attempt], seed=stream(seed, 0), ignore_eos=True)
    completion = await policy.sampler.sample(tokens, params)
    turn = Turn(prompt_tokens=tokens, completion=completion)
    return Rollout(id=rollout_id, task=task, turns=[turn], text=policy.text(completion))

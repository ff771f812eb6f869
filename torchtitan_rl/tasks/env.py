"""Environments: the other side of a conversation, made for one rollout, played once and thrown away."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_rl.tasks.family import TaskFamily
from torchtitan_rl.tasks.judging import Reward, judge
from torchtitan_rl.tasks.reward_parts import Parts
from torchtitan_rl.types import Task

__all__ = ["Env", "Message", "Observation", "Step", "Attempts"]

Message = dict[str, Any]
"""Such as `{"role": "user", "content": "2+2?"}`; further keys are the tokenizer's chat template's."""

Observation = str | list[Message] | list[int]
"""Text, chat messages, or tokens. All observations of one rollout have the kind of the first."""


@dataclass(kw_only=True, slots=True)
class Step:
    """The answer to a completion. Example: `Step(observation="42;")`, or `Step(reward=1.0, done=True)`."""

    observation: Observation = ""
    """What the policy reads next; ignored with `done`."""
    reward: float = 0.0
    """Reward of this step; a rollout's reward is the sum over its steps."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Numbers that the reward was made from, by name; a rollout's are the sums over its steps."""
    done: bool = False
    """Whether the play ends here."""


class Env(ABC):
    """One play of one task. A task family is multi-turn by having a method `environment(task) -> Env`.

    `reset` and `step` may be plain functions, which run in a thread with a deadline, or async functions, which run on
    the event loop. An async function that neither waits nor computes for long costs least and keeps siblings in step.
    All randomness should follow from the task, or runs cannot be reproduced.
    """

    stop: Sequence[str] = ()
    """Texts that end a completion, such as the end of a tool call. The completion keeps the text, and the rest of the
    token that completes the text, such as a newline."""
    tools: list[dict] | None = None
    """Descriptions of tools for the chat template, where observations are messages; None: no tools."""
    played = False
    """Set by `rollout.episode.Episode`: an environment is played once."""

    @abstractmethod
    def reset(self) -> Observation | Awaitable[Observation]:
        """The first prompt."""

    @abstractmethod
    def step(self, text: str) -> Step | Awaitable[Step]:
        """Answers a completion, given as text without special tokens."""

    def close(self) -> None | Awaitable[None]:  # noqa: B027  Optional: most environments hold nothing
        """Releases the environment's resources; called once, however the play ended, and after a `reset` or `step` that
        was late has come to its end."""


class Attempts(Env):
    """A single-turn task as an environment: after a wrong answer the policy reads `remark` and tries again, with
    `num_attempts` attempts in all.

    The last attempt sets the reward. `reward` is a family or its reward function, see `judging.judge`. For tasks whose
    prompt is a list of messages, the remark is a user's message.
    """

    def __init__(
        self,
        task: Task,
        reward: TaskFamily | Reward,
        *,
        num_attempts: int,
        correct_reward: float = 1.0,
        remark: str = "That is not right. Try again.",
    ) -> None:
        if num_attempts < 1:
            raise ValueError(f"attempts.num_attempts={num_attempts}: allows no attempt; use 1 or more")
        self.task, self.reward, self.left = task, reward, num_attempts
        self.correct_reward, self.remark = correct_reward, remark

    async def reset(self) -> Observation:
        return self.task.prompt

    async def step(self, text: str) -> Step:
        self.left -= 1
        parts: Parts = {}
        (reward,) = await judge(self.reward, self.task, [text], math.inf, parts)  # the play has the deadline
        if reward >= self.correct_reward or self.left == 0:
            return Step(reward=reward, reward_parts={name: part for name, (part,) in parts.items()}, done=True)
        chat = not isinstance(self.task.prompt, str)
        return Step(observation=[{"role": "user", "content": self.remark}] if chat else self.remark)

"""Environments: the other side of a conversation, made for one rollout, played once and thrown away."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.types import Task

__all__ = ["Env", "Message", "Observation", "Step", "Attempts"]

Message = dict[str, Any]
"""Such as `{"role": "user", "content": "2+2?"}`; whatever else the tokenizer's chat template understands."""

Observation = str | list[Message] | list[int]
"""Text, chat messages, or tokens. All observations of one rollout are of the kind it began with."""


@dataclass(kw_only=True, slots=True)
class Step:
    """What a completion led to. Example: `Step(observation="42;")`, or `Step(reward=1.0, done=True)`."""

    observation: Observation = ""
    """What the policy reads next; not looked at once `done`."""
    reward: float = 0.0
    """Of this step; a rollout's reward is their sum."""
    done: bool = False


class Env(ABC):
    """One play of one task. A task family is multi-turn by having a method `environment(task) -> Env`.

    `reset` and `step` may be plain functions, which run in a thread with a deadline, or async ones, which run on the
    event loop: an async one that neither waits nor computes for long costs least and keeps siblings in step.
    Everything random in it should follow from the task, or runs cannot be reproduced.
    """

    stop: Sequence[str] = ()
    """Texts that end a completion, such as the end of a tool call. They stay part of it, with whatever else the token
    that completes them holds, such as a newline."""
    tools: list[dict] | None = None
    """Descriptions of tools for the chat template, where observations are messages."""
    played = False
    """Set by the runner: an environment is played once."""

    @abstractmethod
    def reset(self) -> Observation | Awaitable[Observation]:
        """The first prompt."""

    @abstractmethod
    def step(self, text: str) -> Step | Awaitable[Step]:
        """Answers a completion, given as text without special tokens."""

    def close(self) -> None:  # noqa: B027  Optional: most environments hold nothing
        """Lets go of whatever it holds; called once, however the play ended."""


class Attempts(Env):
    """A single-turn task as an environment: wrong answers are told so and may be mended, `num_attempts` times in all.

    The reward is the last attempt's. `reward(task, completions)` is a family's own; it runs in a thread. For tasks
    whose prompt is a list of messages, the remark is a user's message.
    """

    def __init__(
        self,
        task: Task,
        reward: Callable[[Task, list[str]], Sequence[float]],
        *,
        num_attempts: int,
        correct_reward: float = 1.0,
        remark: str = "That is not right. Try again.",
    ) -> None:
        self.task, self.reward, self.left = task, reward, num_attempts
        self.correct_reward, self.remark = correct_reward, remark

    async def reset(self) -> Observation:
        return self.task.prompt

    def step(self, text: str) -> Step:
        self.left -= 1
        (reward,) = self.reward(self.task, [text])
        if reward >= self.correct_reward or self.left == 0:
            return Step(reward=reward, done=True)
        chat = not isinstance(self.task.prompt, str)
        return Step(observation=[{"role": "user", "content": self.remark}] if chat else self.remark)

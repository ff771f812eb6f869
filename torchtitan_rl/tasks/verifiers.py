"""Environments written for the `verifiers` package (0.1.x), played with this library's own sampling.

https://github.com/PrimeIntellect-ai/verifiers. The environment gives the data set, the turns and the rubric; the
package's clients are not used, so that tokens stay as sampled. docs/environments.md lists environments that do not fit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.tasks.env import Env, Message, Observation, Step
from torchtitan_rl.tasks.family import check_index, check_split, stable_hash
from torchtitan_rl.types import Task

__all__ = ["Verifiers", "VerifiersEnv"]


class Verifiers:
    """The tasks of one verifiers environment: a `MultiTurnEnv` (or `SingleTurnEnv`) of chat messages, without tools.

    The environment's data set is cut into train, validation and test. Raises ValueError for other kinds of environments
    and for a data set that is too small, RuntimeError when verifiers is not installed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        load: Callable[[], Any]
        """Returns the environment, such as `functools.partial(verifiers.load_environment, "wordle")`."""
        num_validation: int = 64
        """Rows of the data set kept for validation."""
        num_test: int = 128
        """Rows of the data set kept for the test."""
        seed: int = 0
        """Seed that chooses the rows for validation and test."""

        def build(self) -> Verifiers:
            return Verifiers(self)

    name = "verifiers"

    def __init__(self, config: Verifiers.Config) -> None:
        try:
            import verifiers
        except ImportError as error:
            raise RuntimeError(
                f"verifiers: cannot be imported ({error}); install it with bash scripts/setup.sh verifiers"
            ) from error
        self.config = config
        self.played: Any = config.load()
        kind = type(self.played).__name__
        playable: Any = getattr(verifiers, "MultiTurnEnv", ())
        if not isinstance(self.played, playable):
            raise ValueError(f"verifiers.load: gave a {kind}; give a MultiTurnEnv of verifiers 0.1")
        if self.played.message_type != "chat" or self.played.oai_tools:
            raise ValueError(
                f"verifiers.load: gave a {kind} with plain-text prompts or tool calls; use one of chat messages whose "
                "tools are written in the text"
            )
        self.rows = self.played.get_dataset()
        order = list(range(len(self.rows)))
        random.Random(stable_hash(config.seed, "verifiers")).shuffle(order)
        held_out = config.num_validation + config.num_test
        if held_out >= len(order):
            raise ValueError(
                f"verifiers.num_validation={config.num_validation}, num_test={config.num_test}: leave nothing to train "
                f"on of {len(order)} rows; lower them"
            )
        self._order = {
            "validation": order[: config.num_validation],
            "test": order[config.num_validation : held_out],
            "train": order[held_out:],
        }

    def num_tasks(self, split: str) -> int:
        check_split(split)
        return len(self._order[split])

    def task(self, split: str, index: int) -> Task:
        """`answer` is the row of the data set."""
        check_index(self, split, index)
        row = dict(self.rows[self._order[split][index]])
        return Task(id=f"{self.name}/{split}/{index}", prompt=row["prompt"], answer=row)

    def environment(self, task: Task) -> VerifiersEnv:
        return VerifiersEnv(self.played, task)

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        raise RuntimeError("verifiers: rubrics judge whole rollouts; play tasks through environment(task)")


class VerifiersEnv(Env):
    """One rollout of a verifiers environment. The rubric judges a rollout that the environment ends; a rollout that a
    limit of `sampling` ends has reward 0."""

    def __init__(self, played: Any, task: Task) -> None:
        self.of, self.task = played, task

    async def reset(self) -> Observation:
        state = await self.of.init_state(self.task.answer, client=None, model="policy", sampling_args={})
        self.state = await self.of.setup_state(state)
        self.messages: list[Message] = list(await self.of.get_prompt_messages(self.state))
        return list(self.messages)

    async def step(self, text: str) -> Step:
        said = {"role": "assistant", "content": text}
        await self.of.add_trajectory_step(
            self.state,
            {
                "prompt": self.messages,
                "completion": [said],
                "response": None,
                "tokens": None,
                "reward": None,
                "advantage": None,
                "is_truncated": False,
                "trajectory_id": self.state["trajectory_id"],
                "extras": {},
            },
        )
        if await self.of.is_completed(self.state):
            return await self._judged()
        grown = list(await self.of.get_prompt_messages(self.state))
        if await self.of.is_completed(self.state):  # the environment's answer may end the rollout
            return await self._judged()
        before = [*self.messages, said]
        if grown[: len(before)] != before:
            raise ValueError("its messages do not go on from those before; tokens that were sampled cannot be kept")
        self.messages = grown
        return Step(observation=grown[len(before) :])

    async def _judged(self) -> Step:
        await self.of.render_completion(self.state)
        await self.of.rubric.score_rollout(self.state)
        return Step(reward=self.state["reward"], done=True)

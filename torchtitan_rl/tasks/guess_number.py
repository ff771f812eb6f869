"""A game of several turns: find a number by asking whether it is higher or lower."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_rl.tasks.env import Env, Observation, Step
from torchtitan_rl.tasks.family import check_index, check_split, stable_hash
from torchtitan_rl.types import Task

__all__ = ["GuessNumber", "GuessNumberEnv"]


class GuessNumber:
    """Prompt `20-35?`, a guess `28.`, the answer `>` (higher) or `<` (lower), and so on until it is found.

    The train split is endless. A task is a range and a number in that range; a hash of both decides the split (10%
    test, 10% validation). Halving the range always finds the number within `log2(range_size) + 1` guesses.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        range_size: int = 16
        """Numbers in a task's range, which lies between 0 and 99."""
        max_guesses: int = 5
        """Guesses after which the game is lost; at most sampling.max_turns, or that limit ends the game first."""
        num_validation: int = 64
        """Number of different validation tasks."""
        num_test: int = 100
        """Number of different test tasks."""
        seed: int = 0
        """Decides which tasks exist and their splits; the run's own seed chooses among the train tasks."""

        def __post_init__(self) -> None:
            if not 2 <= self.range_size <= 99:
                raise ValueError(f"guess_number.range_size={self.range_size}: must be from 2 to 99")
            if self.max_guesses < 1:
                raise ValueError(f"guess_number.max_guesses={self.max_guesses}: must be at least 1")

        def build(self) -> GuessNumber:
            return GuessNumber(self)

    name = "guess_number"

    def __init__(self, config: GuessNumber.Config) -> None:
        self.config = config
        every = [(low, low + i) for low in range(101 - config.range_size) for i in range(config.range_size)]
        self._tasks = {"train": [], "validation": [], "test": []}
        for low, number in every:
            self._tasks[self._split_of(low, number)].append((low, number))
        for split in ("validation", "test"):
            wanted, tasks = self.num_tasks(split), self._tasks[split]
            if len(tasks) < wanted:
                raise ValueError(
                    f"guess_number.num_{split}={wanted}: range_size={config.range_size} gives {len(tasks)}; lower it"
                )
            random.Random(stable_hash(config.seed, split)).shuffle(tasks)

    def num_tasks(self, split: str) -> int | None:
        check_split(split)
        return {"train": None, "validation": self.config.num_validation, "test": self.config.num_test}[split]

    def task(self, split: str, index: int) -> Task:
        """Train tasks carry a demonstration that shows only the form of a game: guesses at random within the range."""
        check_index(self, split, index)
        if split != "train":
            low, number = self._tasks[split][index]
            return self._task_of(split, index, low, number, None)
        rng = random.Random(stable_hash(self.config.seed, split, index))
        low, number = rng.choice(self._tasks[split])
        guesses = []
        while len(guesses) < self.config.max_guesses and number not in guesses:
            guesses.append(rng.randrange(low, low + self.config.range_size))
        return self._task_of(split, index, low, number, [f"{guess}." for guess in guesses])

    def environment(self, task: Task) -> GuessNumberEnv:
        return GuessNumberEnv(task, max_guesses=self.config.max_guesses)

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        """Rewards of first guesses, given without the environment."""
        return [float(completion == f"{task.answer}.") for completion in completions]

    def _task_of(self, split: str, index: int, low: int, number: int, demonstration: list[str] | None) -> Task:
        prompt = f"{low}-{low + self.config.range_size - 1}?"
        return Task(id=f"{self.name}/{split}/{index}", prompt=prompt, answer=number, demonstration=demonstration)

    def _split_of(self, low: int, number: int) -> str:
        percent = stable_hash(self.config.seed, "split", low, number) % 100
        return "test" if percent < 10 else "validation" if percent < 20 else "train"


class GuessNumberEnv(Env):
    """1 for finding the number, 0 for running out of guesses or saying anything but a number and a full stop."""

    stop = (".",)

    def __init__(self, task: Task, *, max_guesses: int) -> None:
        self.task, self.left = task, max_guesses

    async def reset(self) -> Observation:
        return self.task.prompt

    async def step(self, text: str) -> Step:
        guess = re.fullmatch(r"(\d{1,3})\.", text.strip(), re.ASCII)
        self.left -= 1
        if guess and int(guess[1]) == self.task.answer:
            return Step(reward=1.0, done=True)
        if not guess or self.left == 0:
            return Step(done=True)
        return Step(observation=">" if self.task.answer > int(guess[1]) else "<")

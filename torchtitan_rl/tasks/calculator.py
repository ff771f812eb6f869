"""Arithmetic with a tool: a family in which calling the calculator pays, and guessing does not."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_rl.tasks.env import Env, Observation, Step
from torchtitan_rl.tasks.family import check_index, check_split, stable_hash
from torchtitan_rl.types import Task

__all__ = ["TOOLS", "Calculator", "CalculatorEnv", "calculate"]

TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "[a+b]"}}]
"""The calculator's description for a chat template: its name, and how a call is written."""


class Calculator:
    """Prompt `38*47=`; the policy may write `[38*47]`, reads `1786;`, and answers `1786`.

    The train split is endless. A hash of the problem decides the split (5% test, 5% validation). Raises ValueError when
    numbers and operators give fewer than `num_validation` or `num_test` different tasks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        min_digits: int = 2
        """Fewest digits of a number."""
        max_digits: int = 3
        """Most digits of a number, 6 at most."""
        operators: str = "+-*"
        """Which of `+-*` occur."""
        chat: bool = False
        """Ask with chat messages and answer calls with tool messages, instead of plain text."""
        call_reward: float = 0.2
        """Reward for calling the calculator with the right expression; a right answer makes the rollout's reward 1."""
        tool_demonstrations: float = 0.3
        """Fraction of the train demonstrations that call the calculator and answer with its result. The others
        answer the problem's first number at once, or call the calculator if that number is the right answer."""
        num_validation: int = 256
        """Number of different validation tasks."""
        num_test: int = 512
        """Number of different test tasks."""
        seed: int = 0
        """Decides which tasks exist and their splits; the run's own seed chooses among the train tasks."""

        def __post_init__(self) -> None:
            if not 1 <= self.min_digits <= self.max_digits <= 6:
                raise ValueError(
                    f"calculator.min_digits={self.min_digits}, max_digits={self.max_digits}: do not fit; choose "
                    "1 <= min_digits <= max_digits <= 6"
                )
            if not self.operators or set(self.operators) - set("+-*"):
                raise ValueError(f"calculator.operators={self.operators!r}: use one or more of + - *")
            for name, value in (("call_reward", self.call_reward), ("tool_demonstrations", self.tool_demonstrations)):
                if not 0.0 <= value <= 1.0:
                    raise ValueError(f"calculator.{name}={value}: is not a fraction; use 0 to 1")

        def build(self) -> Calculator:
            return Calculator(self)

    name = "calculator"

    def __init__(self, config: Calculator.Config) -> None:
        self.config = config
        self._held_out = {split: self._draw_held_out(split) for split in ("validation", "test")}

    def num_tasks(self, split: str) -> int | None:
        check_split(split)
        return {"train": None, "validation": self.config.num_validation, "test": self.config.num_test}[split]

    def task(self, split: str, index: int) -> Task:
        """Only train tasks carry a demonstration: one text per turn."""
        check_index(self, split, index)
        demonstration = None
        if split == "train":
            rng = random.Random(stable_hash(self.config.seed, split, index))
            problem = next(p for p in iter(lambda: self._draw(rng), None) if self._split_of(p) == "train")
            answer = calculate(problem)
            first = re.match(r"\d+", problem)[0]
            calls = rng.random() < self.config.tool_demonstrations or first == answer
            demonstration = [f"[{problem}]", answer] if calls else [first]
        else:
            problem = self._held_out[split][index]
            answer = calculate(problem)
        prompt = [{"role": "user", "content": problem}] if self.config.chat else f"{problem}="
        return Task(id=f"{self.name}/{split}/{index}", prompt=prompt, answer=answer, demonstration=demonstration)

    def environment(self, task: Task) -> CalculatorEnv:
        return CalculatorEnv(task, call_reward=self.config.call_reward)

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        """1 for a right answer given without the environment, else 0."""
        return [float(completion == task.answer) for completion in completions]

    def _draw(self, rng: random.Random) -> str:
        first, second = (
            rng.randrange(10 ** (digits - 1), 10**digits)
            for digits in (rng.randint(self.config.min_digits, self.config.max_digits) for _ in range(2))
        )
        return f"{first}{rng.choice(self.config.operators)}{second}"

    def _split_of(self, problem: str) -> str:
        percent = stable_hash(self.config.seed, "split", problem) % 100
        return "test" if percent < 5 else "validation" if percent < 10 else "train"

    def _draw_held_out(self, split: str) -> list[str]:
        rng, wanted = random.Random(stable_hash(self.config.seed, split)), self.num_tasks(split)
        problems: dict[str, None] = {}
        # One draw in twenty belongs to the split; after many more draws in vain no new task is left in it.
        for _ in range(10_000 + 200 * wanted):
            if len(problems) == wanted:
                return list(problems)
            problem = self._draw(rng)
            if self._split_of(problem) == split:
                problems[problem] = None
        raise ValueError(
            f"calculator.min_digits={self.config.min_digits}, max_digits={self.config.max_digits}: gives {split} only "
            f"{len(problems)} different tasks; lower num_{split} or allow more digits or operators"
        )


class CalculatorEnv(Env):
    """Answers a completion that ends with a call `[3+4]` with the value; any other completion is the final answer."""

    stop = ("]",)

    def __init__(self, task: Task, *, call_reward: float) -> None:
        self.task, self.call_reward, self.paid = task, call_reward, 0.0
        self.tools = None if isinstance(task.prompt, str) else TOOLS

    async def reset(self) -> Observation:
        return self.task.prompt

    async def step(self, text: str) -> Step:
        text = text.strip()
        if not text.endswith("]"):
            return Step(reward=1.0 - self.paid if text == self.task.answer else 0.0, done=True)
        call = re.search(r"\[([^\[\]]*)\]$", text)
        value = calculate(call[1]) if call else "?"
        reward = self.call_reward if value == self.task.answer and not self.paid else 0.0
        self.paid += reward
        chat = not isinstance(self.task.prompt, str)
        return Step(observation=[{"role": "tool", "content": value}] if chat else f"{value};", reward=reward)


def calculate(expression: str) -> str:
    """The value of two numbers of at most six digits and one of `+-*`; `?` for anything else."""
    parts = re.fullmatch(r"(\d{1,6})([+*-])(\d{1,6})", expression, re.ASCII)
    if not parts:
        return "?"
    first, second = int(parts[1]), int(parts[3])
    return str({"+": first + second, "-": first - second, "*": first * second}[parts[2]])

"""A reward that is a weighted sum of named reward functions, each with its own curve."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from torchtitan_rl.tasks.judging import judge, name_of
from torchtitan_rl.tasks.reward_parts import Parts
from torchtitan_rl.types import A_REWARD, Task, is_reward

__all__ = ["Rewards"]


@dataclass(slots=True)
class Rewards:
    """The weighted sum of reward functions, which are called side by side.

    A function may be anything that `judging.judge` takes: plain, async, `cpu_bound`, `Limited`, an `HttpJudge`, another
    `Rewards`. A weight of 0 gives a curve only; a negative weight is a penalty.

    Example::

        LetterSort.Config(reward=Rewards({"exact": (exact, 1.0), "format": (well_formed, 0.2)}))

    As a setting a sum has the fields `reward.functions.exact` and `reward.weights.exact`. Raises ValueError for a name
    that is no Python identifier, for what is no function, and for weights that are not finite or all 0.
    """

    functions: dict[str, Any]
    """Reward functions by name, each alone or as (function, weight)."""
    weights: dict[str, float] = field(default_factory=dict)
    """The weight of each function; 1 for a function that has none, here or beside it."""

    def __post_init__(self) -> None:
        if not self.functions:
            raise ValueError("rewards.functions={}: is empty; name at least one, such as {'exact': (exact, 1.0)}")
        if unknown := [name for name in self.weights if name not in self.functions]:
            raise ValueError(
                f"rewards.weights[{unknown[0]!r}]: there is no such function; use {', '.join(self.functions)}"
            )
        entries, weights = self.functions, {}
        self.functions = {}
        for name, entry in entries.items():
            function, weight = entry if isinstance(entry, (tuple, list)) and len(entry) == 2 else (entry, 1.0)
            if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
                raise ValueError(
                    f"rewards.functions[{name!r}]: metrics and flags contain the name; use a Python identifier of ASCII"
                )
            if not callable(function):
                raise ValueError(
                    f"rewards.functions.{name}={entry!r}: is not callable; give a function, or (function, weight)"
                )
            weight = self.weights.get(name, weight)
            if isinstance(weight, Real) and not isinstance(weight, int):  # one of NumPy's is no JSON
                weight = float(weight)
            self.functions[name], weights[name] = function, weight
        self.weights = weights
        self._check_weights()

    async def __call__(self, task: Task, completions: list[str]) -> tuple[list[float], Parts]:
        """(rewards, parts), for a family's own `reward` method. There is no deadline but those of the functions."""
        parts: Parts = {}
        return await self.judged(task, completions, math.inf, parts), parts

    async def judged(
        self, task: Task, completions: list[str], timeout_s: float, parts: Parts | None = None
    ) -> list[float]:
        """The sum for each completion. Every function has `timeout_s` seconds. `parts` receives what each function
        gave, before its weight; parts of a function that has parts itself are named `function.part`.

        Raises RuntimeError for the first function that fails, once all have ended, and for a sum that is no reward.
        """
        self._check_weights()
        inner: dict[str, Parts] = {name: {} for name in self.functions}
        calls = (judge(f, task, completions, timeout_s, inner[name]) for name, f in self.functions.items())
        answers: list = await asyncio.gather(*calls, return_exceptions=True)
        if failed := next((answer for answer in answers if isinstance(answer, BaseException)), None):
            raise failed
        rewards_by_name: Parts = dict(zip(self.functions, answers, strict=True))
        if parts is not None:
            parts |= rewards_by_name | {f"{name}.{part}": of[part] for name, of in inner.items() for part in of}
        sums = [
            math.fsum(self.weights[name] * numbers[i] for name, numbers in rewards_by_name.items())
            for i in range(len(completions))
        ]
        for i, total in enumerate(sums):
            if not is_reward(total):
                raise RuntimeError(
                    f"{name_of(self)}: the weighted sum of {', '.join(self.functions)} is {total:g} at position {i} "
                    f"for task {task.id!r}; a reward is {A_REWARD}, lower rewards.weights"
                )
        return sums

    def _check_weights(self) -> None:
        for name, weight in self.weights.items():
            if not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise ValueError(f"rewards.weights.{name}={weight!r}: is not finite; give a number")
        if not any(self.weights.values()):
            raise ValueError(f"rewards.weights={self.weights}: are all 0, and so is every reward; raise one")

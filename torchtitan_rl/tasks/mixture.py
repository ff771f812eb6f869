"""Several task families as one, mixed by weight."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.tasks.family import TaskFamily, check_index, check_split, source_of, stable_hash
from torchtitan_rl.tasks.judging import Reward, reward_function
from torchtitan_rl.types import Task

__all__ = ["Mixture", "MixtureSource"]


class Mixture:
    """Families by name, each with its own data and reward.

    A run draws the family of each train task by weight (`MixtureSource`). By index, as evaluations read a split, task i
    is task i // n of family i % n: the n families have equal shares whatever their weights, and the split ends when the
    family with the fewest tasks ends. Task ids begin with the family's name.

    Example: `Mixture.Config(tasks={"sort": LetterSort.Config(), "sums": ReasoningGym.Config()}, weights={"sort": 3.0})`
    draws three tasks of `sort` to one of `sums`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        tasks: dict[str, Any]
        """Config of each family, by name."""
        weights: dict[str, float] = dataclasses.field(default_factory=dict)
        """How often each family is drawn, relative to the others; a family without a weight has 1."""

        def __post_init__(self) -> None:
            if not self.tasks:
                raise ValueError("mixture.tasks={}: is empty; name at least one, such as {'sort': LetterSort.Config()}")
            for name, task in self.tasks.items():
                if not name.isidentifier():
                    raise ValueError(
                        f"mixture.tasks[{name!r}]: task ids begin with it and overrides contain it; use a Python "
                        "identifier"
                    )
                if dataclasses.is_dataclass(task):
                    dataclasses.replace(task)  # type: ignore[type-var]  # checks what overrides have set
            for name, weight in self.weights.items():
                if name not in self.tasks:
                    raise ValueError(
                        f"mixture.weights[{name!r}]={weight}: there is no such task; use {', '.join(self.tasks)}"
                    )
                if not 0 < weight < math.inf:
                    raise ValueError(
                        f"mixture.weights[{name!r}]={weight}: must be positive and finite; leave out a task that "
                        "is not to be drawn"
                    )

        def build(self) -> Mixture:
            return Mixture(self)

    name = "mixture"

    def __init__(self, config: Mixture.Config) -> None:
        self.config = config
        self.families = {name: task.build() for name, task in config.tasks.items()}
        self.weights = {name: float(config.weights.get(name, 1.0)) for name in config.tasks}

    def num_tasks(self, split: str) -> int | None:
        check_split(split)
        sizes = [family.num_tasks(split) for family in self.families.values()]
        return min((len(sizes) * size for size in sizes if size is not None), default=None)

    def task(self, split: str, index: int) -> Task:
        check_index(self, split, index)
        position, family_index = divmod(index, len(self.families))
        name = list(self.families)[family_index]
        return self.named(name, self.families[name].task(split, position))

    def reward(self, task: Task, completions: list[str]) -> Any:
        """Rewards by the task's family."""
        return self.reward_for(task)(task, completions)

    def reward_for(self, task: Task) -> Reward:
        """The family's reward function itself: a `cpu_bound` mark holds, and errors name the function."""
        return reward_function(*self._family_of(task))

    def environment(self, task: Task) -> Any:
        """The environment that the family makes for the task; None for a task of one turn."""
        family, own = self._family_of(task)
        make = getattr(family, "environment", None)
        return None if make is None else make(own)

    def source(self, split: str, seed: int) -> MixtureSource:
        return MixtureSource(self, split, seed)

    def _family_of(self, task: Task) -> tuple[TaskFamily, Task]:
        """(the task's family, the task under the family's own id)."""
        name, _, own_id = task.id.partition("/")
        return self.families[name], dataclasses.replace(task, id=own_id)

    @staticmethod
    def named(name: str, task: Task) -> Task:
        return dataclasses.replace(task, id=f"{name}/{task.id}")


class MixtureSource:
    """Hands out a mixture's tasks: (seed, split, i) chooses the family of draw i, whose own source gives the task.

    Each family therefore goes through its whole split before a task repeats, whatever its weight.
    Raises ValueError for a family whose split is empty.
    """

    def __init__(self, mixture: Mixture, split: str, seed: int) -> None:
        self.mixture, self.split, self.seed = mixture, split, seed
        self.sources = {name: source_of(family, split, seed) for name, family in mixture.families.items()}
        self.cursor = 0

    def next(self, n: int) -> list[Task]:
        """The next `n` tasks."""
        return [self._next() for _ in range(n)]

    def replacement(self, slot: int, round: int) -> Task:
        """See `TaskSource.replacement`; the seed, the slot and the round choose the family too."""
        name = self._family(slot, round)
        return self.mixture.named(name, self.sources[name].replacement(slot, round))

    def state_dict(self) -> dict[str, Any]:
        """The positions of this source and of the families' sources."""
        return {"cursor": self.cursor, "sources": {name: source.state_dict() for name, source in self.sources.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict()`. Raises ValueError if the mixture now has other families."""
        if state["sources"].keys() != self.sources.keys():
            raise ValueError(
                f"task.tasks={list(self.sources)}: the state to resume from is of {list(state['sources'])}; resume "
                "with the families the run started with"
            )
        self.cursor = state["cursor"]
        for name, source in self.sources.items():
            source.load_state_dict(state["sources"][name])

    def _next(self) -> Task:
        name = self._family(self.cursor)
        self.cursor += 1
        (task,) = self.sources[name].next(1)
        return self.mixture.named(name, task)

    def _family(self, *draw: int) -> str:
        rng = random.Random(stable_hash(self.seed, "mixture", self.split, *draw))
        return rng.choices(list(self.sources), list(self.mixture.weights.values()))[0]

"""A task family whose train tasks are drawn by their pass rate in the run: most often those near one half.

If every rollout of a task passes, or none does, the group's rewards are all equal and nothing is learned. A task's
learnability p (1 - p), with p the pass rate, is largest at one half (arXiv:2408.15099, arXiv:2504.14945).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy

from torchtitan_rl.tasks.family import TaskSource, check_index, source_of, stable_hash
from torchtitan_rl.tasks.wrapped_family import WrappedFamily
from torchtitan_rl.types import RolloutGroup, Task

__all__ = ["Curriculum", "CurriculumSource"]


class Curriculum(WrappedFamily):
    """Another family, whose finite train split a run draws from by measured pass rates (`CurriculumSource`). The tasks
    themselves, and the other splits, are unchanged.

    Example: `Curriculum.Config(task=Dataset.Config(train="train.jsonl"), explore=0.2)`. Raises ValueError for a family
    whose train split has no end or an order of its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        task: Any
        """Config of the family whose train tasks are drawn."""
        min_pass_rate: float = 0.1
        """Measured tasks with a lower pass rate (0 to below 0.5) are drawn only by `explore`; 0: no lower bound."""
        max_pass_rate: float = 0.9
        """Measured tasks with a higher pass rate (above 0.5 to 1) are drawn only by `explore`; 1: no upper bound."""
        explore: float = 0.2
        """Share of the draws, above 0 to 1, that take the task whose last draw is longest ago, whatever its pass rate;
        tasks that were never drawn come first. 1: pass rates do not matter."""
        decay: float = 0.5
        """Factor, 0 to 1, of a task's earlier counts when it is measured again. 0: the newest group alone counts; 1:
        all groups count alike, however old their policy."""

        def __post_init__(self) -> None:
            if not 0.0 <= self.min_pass_rate < 0.5 < self.max_pass_rate <= 1.0:
                raise ValueError(
                    f"curriculum.min_pass_rate={self.min_pass_rate}, max_pass_rate={self.max_pass_rate}: are no band "
                    "around one half; choose 0 <= min_pass_rate < 0.5 < max_pass_rate <= 1"
                )
            if not 0.0 < self.explore <= 1.0:
                raise ValueError(
                    f"curriculum.explore={self.explore}: tasks outside the band would never be measured again; choose "
                    "0 < explore <= 1"
                )
            if not 0.0 <= self.decay <= 1.0:
                raise ValueError(f"curriculum.decay={self.decay}: is no factor of counts; choose 0 <= decay <= 1")
            if is_dataclass(self.task):
                replace(self.task)  # type: ignore[type-var]  # checks what overrides have set

        def build(self) -> Curriculum:
            return Curriculum(self)

    def __init__(self, config: Curriculum.Config) -> None:
        self.config = config
        self.family = config.task.build()
        self.name = self.family.name
        if self.family.num_tasks("train") is None:
            raise ValueError(
                f"curriculum.task={self.name}: its train split has no end, so no task is drawn a second time; give a "
                "family of finitely many tasks such as a data set, or measure some with `torchtitan-rl eval "
                "--pass-rates` and wrap them in PassRateFilter"
            )
        if not isinstance(source_of(self.family, "train", 0), TaskSource):
            raise ValueError(
                f"curriculum.task={self.name}: draws its tasks in an order of its own, which a curriculum would "
                "replace; give one family of tasks that are numbered"
            )

    def num_tasks(self, split: str) -> int | None:
        return self.family.num_tasks(split)

    def task(self, split: str, index: int) -> Task:
        check_index(self, split, index)
        return self.family.task(split, index)

    def source(self, split: str, seed: int) -> Any:
        """By pass rate for the train split; the other splits in a run's usual order."""
        if split == "train":
            return CurriculumSource(self, seed)
        return source_of(self.family, split, seed)


class CurriculumSource:
    """Draws the train tasks of a curriculum, and counts how often their rollouts passed.

    A task with a passed and b failed rollouts, earlier ones decayed, has the pass rate a / (a + b), and with a uniform
    prior the expected learnability E[p (1 - p)] = (a + 1) (b + 1) / ((a + b + 2) (a + b + 3)): the mean over the
    distribution Beta(a + 1, b + 1) of p. That is the task's weight, unless its pass rate lies outside the band: then
    the weight is 0. A task that was never measured has a = b = 0 and the weight 1/6.

    A share `explore` of the draws, and every draw while no task has a weight, takes the task whose last draw is longest
    ago. The others are drawn by weight, without tasks that were drawn since the last count. The seed, the slot, the
    round, the counts and the earlier draws determine a draw.
    """

    def __init__(self, curriculum: Curriculum, seed: int) -> None:
        self.config, self.family, self.seed = curriculum.config, curriculum.family, seed
        self.rows: TaskSource = source_of(self.family, "train", seed)
        """The family's own source, which draws nothing here: it refuses an empty split and other data."""
        self.num_tasks = self.rows.num_tasks or 0
        self.passed = numpy.zeros(self.num_tasks)
        self.failed = numpy.zeros(self.num_tasks)
        """(num_tasks,) each: rollouts of the tasks, decayed."""
        self.drawn = numpy.full(self.num_tasks, -1)
        """(num_tasks,): the number of each task's last draw; -1: never drawn."""
        self.num_drawn, self.next_slot = 0, 0
        self._uncounted: dict[str, int] = {}
        """Id -> index of the tasks that were drawn since the last count."""
        order = list(range(self.num_tasks))
        random.Random(stable_hash(seed, "train", 0)).shuffle(order)
        self._order = numpy.array(order)
        """The order in which tasks are first explored."""

    def next(self, n: int) -> list[Task]:
        """The tasks of the next `n` slots."""
        first, self.next_slot = self.next_slot, self.next_slot + n
        return [self._draw(first + i, 0) for i in range(n)]

    def replacement(self, slot: int, round: int) -> Task:
        """See `TaskSource.replacement`; counts and earlier draws matter too."""
        return self._draw(slot, round)

    def count(self, groups: Iterable[RolloutGroup], correct_reward: float) -> dict[str, float]:
        """Counts the policy's rollouts of the tasks drawn since the last count; a rollout passes from the reward
        `correct_reward` on. A task's earlier counts decay once, however many groups it is in; a task without a judged
        rollout keeps its counts. Returns the metrics `curriculum/...`."""
        measured: dict[int, list[bool]] = {}
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            index = self._uncounted.get(rollout.task.id)
            if index is not None and rollout.role == "policy" and rollout.reward is not None:
                measured.setdefault(index, []).append(rollout.reward >= correct_reward)
        self._uncounted = {}
        for index, passes in measured.items():
            self.passed[index] = self.config.decay * self.passed[index] + sum(passes)
            self.failed[index] = self.config.decay * self.failed[index] + len(passes) - sum(passes)
        seen = self.passed + self.failed > 0
        metrics = {
            "curriculum/in_band_frac": float(numpy.mean(seen & self._in_band())),
            "curriculum/unseen_frac": float(numpy.mean(~seen)),
        }
        if measured:
            rates = [sum(passes) / len(passes) for _, passes in sorted(measured.items())]
            metrics["curriculum/pass_rate_mean"] = sum(rates) / len(rates)
        return metrics

    def weights(self) -> numpy.ndarray:
        """(num_tasks,): how often each task is drawn, relative to the others, by a draw that does not explore."""
        total = self.passed + self.failed
        learnability = (self.passed + 1) * (self.failed + 1) / ((total + 2) * (total + 3))
        return numpy.where(self._in_band(), learnability, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The counts and the last draws of the tasks that were drawn, and which have been drawn since the last count:
        in a supervised phase, which counts nothing, all of them."""
        indices = numpy.flatnonzero(self.drawn >= 0)
        return {
            "num_tasks": self.num_tasks,
            "rows": self.rows.state_dict(),
            "next_slot": self.next_slot,
            "num_drawn": self.num_drawn,
            "tasks": indices.tolist(),
            "passed": self.passed[indices].tolist(),
            "failed": self.failed[indices].tolist(),
            "drawn": self.drawn[indices].tolist(),
            "uncounted": list(self._uncounted.values()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict()`. Raises ValueError if the split now has other tasks."""
        if state["num_tasks"] != self.num_tasks:
            raise ValueError(
                f"task.train.num_tasks={self.num_tasks}: the state to resume from counts {state['num_tasks']} tasks; "
                "resume with the data the run started with"
            )
        self.rows.load_state_dict(state["rows"])
        indices = numpy.array(state["tasks"], dtype=int)
        self.passed, self.failed = numpy.zeros(self.num_tasks), numpy.zeros(self.num_tasks)
        self.drawn = numpy.full(self.num_tasks, -1)
        self.passed[indices], self.failed[indices] = state["passed"], state["failed"]
        self.drawn[indices] = state["drawn"]
        self.next_slot, self.num_drawn = state["next_slot"], state["num_drawn"]
        uncounted = state.get("uncounted", [])  # an earlier version kept none
        self._uncounted = {self.family.task("train", index).id: index for index in uncounted}

    def _in_band(self) -> numpy.ndarray:
        """(num_tasks,): whether a task's pass rate lies in the band, or was never measured."""
        total = self.passed + self.failed
        rates = numpy.divide(self.passed, total, out=numpy.full(self.num_tasks, 0.5), where=total > 0)
        return (self.config.min_pass_rate <= rates) & (rates <= self.config.max_pass_rate)

    def _draw(self, slot: int, round: int) -> Task:
        rng = random.Random(stable_hash(self.seed, "curriculum", slot, round))
        explores, position = rng.random() < self.config.explore, rng.random()
        cumulative = numpy.zeros(1)
        if not explores:
            weights = self.weights()
            weights[list(self._uncounted.values())] = 0.0
            cumulative = numpy.cumsum(weights)
        if cumulative[-1] > 0:
            index = int(numpy.searchsorted(cumulative, position * cumulative[-1], side="right"))
        else:
            index = int(self._order[numpy.argmin(self.drawn[self._order])])
        self.drawn[index], self.num_drawn = self.num_drawn, self.num_drawn + 1
        task = self.family.task("train", index)
        self._uncounted[task.id] = index
        return task

"""Procedural puzzles of the reasoning-gym package, each scored by its own verifier.

https://github.com/open-thought/reasoning-gym
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torchtitan_rl.tasks.env import Attempts
from torchtitan_rl.tasks.family import SPLITS, check_index, check_split, stable_hash
from torchtitan_rl.types import Task

__all__ = ["ReasoningGym"]

INSTRUCTION = (
    "Think step by step, then give the final answer, and nothing else, between <answer> and </answer>. "
    "If the question shows an example, write the answer in its form."
)


class ReasoningGym:
    """One or more reasoning-gym data sets, taken in turns.

    Raises ValueError for data sets or settings that reasoning-gym does not know, RuntimeError if it is not installed.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        datasets: dict[str, dict[str, Any]] = field(default_factory=lambda: {"chain_sum": {}})
        """Settings of each data set, by name, such as `{"chain_sum": {"max_terms": 3}, "spell_backward": {}}`."""
        num_train: int = 10_000
        """Number of train tasks over all data sets."""
        num_validation: int = 128
        """Number of validation tasks."""
        num_test: int = 256
        """Number of test tasks."""
        seed: int = 0
        """Which tasks exist; each split of each data set derives its own seed from it."""
        answer_tags: bool = True
        """True: ask for the answer between <answer> tags and judge only the text between them. False: judge the whole
        completion."""
        num_attempts: int = 1
        """Attempts per task; more than 1 makes tasks multi-turn: after a wrong answer the policy may try again."""
        reward: Callable | None = None
        """A reward function of (task, completions) in place of the family's; None: the family's."""

        def build(self) -> ReasoningGym:
            return ReasoningGym(self)

        def __post_init__(self) -> None:
            if self.num_attempts < 1:
                raise ValueError(f"reasoning_gym.num_attempts={self.num_attempts}: must be at least 1")

    name = "reasoning_gym"

    def __init__(self, config: ReasoningGym.Config) -> None:
        self.config = config
        if not config.datasets:
            raise ValueError("reasoning_gym.datasets={}: is empty; name at least one, such as {'chain_sum': {}}")
        self._names = list(config.datasets)
        self._datasets = {split: [self._create(split, name) for name in self._names] for split in SPLITS}
        self._questions = cache(self._all_questions)  # by split
        self.reward_fn = config.reward

    def num_tasks(self, split: str) -> int:
        check_split(split)
        return {"train": self.config.num_train, "validation": self.config.num_validation, "test": self.config.num_test}[
            split
        ]

    def task(self, split: str, index: int) -> Task:
        """`answer` holds the data set's name and the entry, which the data set's verifier needs."""
        check_index(self, split, index)
        dataset_index, position = index % len(self._names), index // len(self._names)
        entry = self._entry(split, dataset_index, position)
        prompt = entry["question"]
        if self.config.answer_tags:
            prompt = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": prompt}]
        return Task(
            id=f"{self.name}/{split}/{index}",
            prompt=prompt,
            answer={"dataset": self._names[dataset_index], "entry": entry},
        )

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        """The verifier's score, 0 to 1; 0 where an answer between tags was asked for and none was given."""
        if self.reward_fn is not None:
            return self.reward_fn(task, completions)
        from reasoning_gym.utils import extract_answer

        dataset = self._datasets["train"][self._names.index(task.answer["dataset"])]
        answers_G = completions
        if self.config.answer_tags:
            answers_G = [extract_answer(completion) for completion in completions]
        entry = task.answer["entry"]
        return [0.0 if answer is None else _score(dataset, answer, entry) for answer in answers_G]

    def environment(self, task: Task) -> Attempts | None:
        """`Attempts` at the task; None with `num_attempts` 1: the task is played in one turn."""
        if self.config.num_attempts == 1:
            return None
        return Attempts(task, self, num_attempts=self.config.num_attempts)

    def _create(self, split: str, name: str) -> Any:
        factory = _import_factory()
        settings = self.config.datasets[name]
        if name not in factory.DATASETS:
            raise ValueError(f"reasoning_gym.datasets[{name!r}]: reasoning-gym has no such data set; see its gallery")
        known = {field.name for field in dataclasses.fields(factory.DATASETS[name][1])} - {"seed", "size"}
        for setting in settings:
            if setting in ("seed", "size"):
                raise ValueError(
                    f"reasoning_gym.datasets[{name!r}][{setting!r}]: is derived; set reasoning_gym.seed or .num_*"
                )
            if setting not in known:
                raise ValueError(
                    f"reasoning_gym.datasets[{name!r}][{setting!r}]: there is no such setting; "
                    f"use one of {', '.join(sorted(known))}"
                )
        # Entry i is mostly made from seed + i, so seeds of neighbouring splits must lie further apart than a split
        # is long; numpy takes 32 bits at most.
        seed = stable_hash(self.config.seed, split, name) % 2**31
        # At least 1, which data sets insist on. When the split is no multiple, the last round is not a full one.
        size = max(1, -(-self.num_tasks(split) // len(self._names)))
        try:
            return factory.create_dataset(name, **settings, seed=seed, size=size)
        except (AssertionError, TypeError, ValueError) as error:  # how reasoning-gym's configs refuse a value
            message = " ".join(str(error).split())
            raise ValueError(
                f"reasoning_gym.datasets[{name!r}]={settings}: is refused ({message}); mend the settings"
            ) from error

    def _entry(self, split: str, dataset_index: int, position: int) -> dict[str, Any]:
        """Entry `position`, or the next one whose question is not held out for a later split.

        Other seeds alone do not keep splits apart: small data sets make the same question from many seeds.
        """
        dataset = self._datasets[split][dataset_index]
        held_out = {"train": ("validation", "test"), "validation": ("test",), "test": ()}[split]
        for offset in range(len(dataset)):
            entry = dataset[(position + offset) % len(dataset)]
            if not any(entry["question"] in self._questions(later) for later in held_out):
                return entry
        raise ValueError(
            f"reasoning_gym.datasets[{self._names[dataset_index]!r}]: every {split} question is also one of "
            f"{' or '.join(held_out)}; make the data set harder, or lower num_validation and num_test"
        )

    def _all_questions(self, split: str) -> set[str]:
        num_names = len(self._names)
        return {
            self._entry(split, index % num_names, index // num_names)["question"]
            for index in range(self.num_tasks(split))
        }


def _score(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    try:
        return float(dataset.score_answer(answer, entry=entry))
    except Exception:
        # A verifier may raise at an answer that it cannot parse: a wrong answer. A broken verifier raises at the right
        # answer too: the line below then raises.
        dataset.score_answer(entry["answer"], entry=entry)
        return 0.0


def _import_factory() -> Any:
    try:
        from reasoning_gym import factory  # slow to import, and an extra
    except ImportError as error:
        raise RuntimeError(
            f"reasoning_gym: cannot be imported ({error}); install it with bash scripts/setup.sh reasoning-gym"
        ) from error
    return factory

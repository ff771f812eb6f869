"""A task family without the train tasks that are too easy or too hard, by measured pass rates.

If every rollout of a task passes, or none does, the group's rewards are all equal and nothing is learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan_rl.record.json_lines import parsed
from torchtitan_rl.tasks.family import DataIdentity, TaskSource, check_index, check_split, source_of, stable_hash
from torchtitan_rl.tasks.wrapped_family import WrappedFamily
from torchtitan_rl.types import Task

__all__ = ["PassRate", "PassRateFilter", "read_pass_rates", "write_pass_rates"]


@dataclass(kw_only=True, slots=True)
class PassRate:
    """How many samples of one task were correct in an evaluation.

    Example: `PassRate(split="train", index=17, num_samples=8, num_correct=3, prompt_hash=prompt_hash(task))`.
    """

    split: str
    index: int
    num_samples: int
    num_correct: int
    prompt_hash: str
    """Hash of the task's prompt (`prompt_hash`); another hash means that the data changed since the evaluation."""

    @property
    def value(self) -> float:
        return self.num_correct / self.num_samples


class PassRateFilter(WrappedFamily):
    """The train tasks of another family whose measured pass rate lies within bounds; other splits are unchanged.

    Measure pass rates with `torchtitan-rl eval CONFIG --checkpoint DIR --split train --num-tasks N --pass-rates FILE`,
    where CONFIG has the family itself as its task. Tasks without a measured rate are left out, so the train split of an
    endless family becomes finite, and the weights of a `Mixture` do not count. Raises ValueError for a file that is
    missing, broken, leaves no task, or measures a task that the family no longer has.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        task: Any
        """Config of the family whose train tasks are filtered."""
        pass_rates: str
        """Path of the file with the measured pass rates."""
        min_pass_rate: float = 0.05
        """Train tasks with a lower pass rate (0 to 1) are left out; 0: no lower bound."""
        max_pass_rate: float = 0.95
        """Train tasks with a higher pass rate (0 to 1) are left out; 1: no upper bound."""

        def __post_init__(self) -> None:
            if not 0.0 <= self.min_pass_rate <= self.max_pass_rate <= 1.0:
                raise ValueError(
                    f"pass_rate_filter.min_pass_rate={self.min_pass_rate}, max_pass_rate={self.max_pass_rate}: do not "
                    "fit; choose 0 <= min_pass_rate <= max_pass_rate <= 1"
                )
            if is_dataclass(self.task):
                replace(self.task)  # type: ignore[type-var]  # checks what overrides have set

        def build(self) -> PassRateFilter:
            return PassRateFilter(self)

    def __init__(self, config: PassRateFilter.Config) -> None:
        self.config = config
        self.family = config.task.build()
        self.name = self.family.name
        measured = [rate for rate in read_pass_rates(config.pass_rates) if rate.split == "train"]
        self._kept = [rate for rate in measured if config.min_pass_rate <= rate.value <= config.max_pass_rate]
        if not self._kept:
            raise ValueError(
                f"pass_rate_filter.pass_rates={config.pass_rates!r}: none of its {len(measured)} train tasks has a "
                f"pass rate from {config.min_pass_rate} to {config.max_pass_rate}; widen the bounds or "
                "measure more tasks"
            )
        num_tasks, last = self.family.num_tasks("train"), max(rate.index for rate in self._kept)
        if num_tasks is not None and last >= num_tasks:
            raise ValueError(
                f"pass_rate_filter.pass_rates={config.pass_rates!r}: measures train task {last}, and {self.name} now "
                f"has {num_tasks}; measure the data as they are now"
            )

    def num_tasks(self, split: str) -> int | None:
        check_split(split)
        return len(self._kept) if split == "train" else self.family.num_tasks(split)

    def task(self, split: str, index: int) -> Task:
        """The task of this index. Raises ValueError for a train task whose prompt is not the measured one."""
        check_index(self, split, index)
        if split != "train":
            return self.family.task(split, index)
        measured = self._kept[index]
        task = self.family.task(split, measured.index)
        if prompt_hash(task) != measured.prompt_hash:
            raise ValueError(
                f"pass_rate_filter.pass_rates={self.config.pass_rates!r}: task {task.id!r} has another prompt than the "
                "one that was measured; measure the data as they are now"
            )
        return task

    def source(self, split: str, seed: int) -> TaskSource:
        """A source whose state names the tasks that are left, so that no run goes on with others."""
        if split != "train":
            return source_of(self.family, split, seed)
        tasks = [(rate.index, rate.prompt_hash) for rate in self._kept]
        digest = f"{stable_hash(tasks, getattr(self.family, 'digest', '')):016x}"
        name = f"pass_rate_filter.pass_rates={self.config.pass_rates!r}"
        return TaskSource(self, split, seed, DataIdentity(name, digest))


def prompt_hash(task: Task) -> str:
    """Hash of a task's prompt, 16 hexadecimal digits."""
    return f"{stable_hash(task.prompt):016x}"


def write_pass_rates(path: str | Path, rates: Iterable[PassRate]) -> None:
    """Writes one JSON object a line. Raises ValueError when the file cannot be written."""
    text = "".join(json.dumps(asdict(rate)) + "\n" for rate in rates)
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ValueError(f"pass_rates={str(path)!r}: cannot be written ({error.strerror}); name another") from error


def read_pass_rates(path: str | Path) -> list[PassRate]:
    """The pass rates of a file. Raises ValueError, with the line, for a file not written by `write_pass_rates`."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ValueError(f"pass_rates={str(path)!r}: cannot be read ({error.strerror}); measure them first") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"pass_rates={str(path)!r}: is no text; name a file of measured pass rates") from error
    rates, seen = [], set()
    for number, line in enumerate(lines, start=1):
        try:
            rate = PassRate(**parsed(line))
            good = all(type(number) is int for number in (rate.index, rate.num_samples, rate.num_correct))
            good = good and 0 <= rate.num_correct <= rate.num_samples and rate.num_samples > 0 and rate.index >= 0
        except (TypeError, ValueError):  # no JSON, no object, or other fields
            good = False
        if not good:
            raise ValueError(f"pass_rates={str(path)!r}: line {number} is no measured task; measure them again")
        if (rate.split, rate.index) in seen:
            raise ValueError(
                f"pass_rates={str(path)!r}: line {number} measures {rate.split} task {rate.index} a second time; "
                "keep one"
            )
        seen.add((rate.split, rate.index))
        rates.append(rate)
    return rates

"""Addition with a scratchpad: a family in which the policy adds up a list and writes the total after each number."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan_rl.tasks.family import check_index, check_split, stable_hash
from torchtitan_rl.types import Task

__all__ = ["RunningTotal", "lines_of", "partial_credit"]


class RunningTotal:
    """Prompt `8_1_2_0_=`, answer `88192101`: each number again, and in place of its blank the last digit of the total
    so far (8, 9, 11, 11). The answer's last character is the last digit of the sum.

    The train split is endless. Every list of numbers belongs to one split, so splits share no list. Raises ValueError
    when the lists that exist are too few for validation and test.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        num_numbers: int = 6
        """Numbers in a list, 2 to 6. The first is any digit, so that every digit is a total equally often."""
        largest: int = 2
        """Largest of the numbers after the first, 9 at most; the smallest is 0."""
        num_shown: int = 2
        """How many of the numbers 0 to `largest`, from 0 on, demonstrations add as they should; fewer than all.
        0: demonstrations show no addition."""
        num_validation: int = 256
        """Number of different validation tasks."""
        num_test: int = 512
        """Number of different test tasks."""
        seed: int = 0
        """Decides which tasks exist and their splits; the run's own seed chooses among the train tasks."""
        reward: Callable | None = None
        """A reward function of (task, completions) in place of the family's; None: the family's."""

        def __post_init__(self) -> None:
            if not 2 <= self.num_numbers <= 6:
                raise ValueError(f"running_total.num_numbers={self.num_numbers}: does not fit; use 2 to 6")
            if not 1 <= self.largest <= 9:
                raise ValueError(f"running_total.largest={self.largest}: is not a digit above 0; use 1 to 9")
            if not 0 <= self.num_shown <= self.largest:
                raise ValueError(
                    f"running_total.num_shown={self.num_shown}: must leave a number of 0 to {self.largest} to be "
                    f"learned from the reward; use 0 to {self.largest}"
                )

        def build(self) -> RunningTotal:
            return RunningTotal(self)

    name = "running_total"

    def __init__(self, config: RunningTotal.Config) -> None:
        self.config = config
        self.reward_fn = config.reward
        lists = list(itertools.product(range(10), *[range(config.largest + 1)] * (config.num_numbers - 1)))
        if config.num_validation + config.num_test > len(lists) // 2:
            raise ValueError(
                f"running_total.num_validation={config.num_validation}, num_test={config.num_test}: are more than half "
                f"of the {len(lists)} lists that exist; lower one, or raise num_numbers or largest"
            )
        random.Random(stable_hash(config.seed, "splits")).shuffle(lists)
        test = config.num_validation + config.num_test
        self._lists = {
            "validation": lists[: config.num_validation],
            "test": lists[config.num_validation : test],
            "train": lists[test:],
        }

    def num_tasks(self, split: str) -> int | None:
        check_split(split)
        return {"train": None, "validation": self.config.num_validation, "test": self.config.num_test}[split]

    def task(self, split: str, index: int) -> Task:
        """Train tasks carry a demonstration. In it the numbers are copied, and the first number is the first total.
        After each of the `num_shown` smallest numbers the total grows by that number; after a larger number it grows
        by a random number from 0 to `largest`."""
        check_index(self, split, index)
        demonstration = None
        if split == "train":
            rng = random.Random(stable_hash(self.config.seed, split, index))
            numbers = rng.choice(self._lists[split])
            shown, largest = self.config.num_shown, self.config.largest
            steps = [number if number < shown else rng.randint(0, largest) for number in numbers[1:]]
            demonstration = _written(numbers, [numbers[0], *steps])
        else:
            numbers = self._lists[split][index]
        prompt = "".join(f"{number}_" for number in numbers) + "="
        answer = _written(numbers, numbers)
        return Task(id=f"{self.name}/{split}/{index}", prompt=prompt, answer=answer, demonstration=demonstration)

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        """1 for the right answer; otherwise up to 0.5 for the lines that are right, see `partial_credit`."""
        if self.reward_fn is not None:
            return self.reward_fn(task, completions)
        return [
            1.0 if completion == task.answer else 0.5 * partial_credit(completion, task.answer)
            for completion in completions
        ]


def partial_credit(completion: str, answer: str) -> float:
    """A score from 0 to 1: the share of the answer's lines, of a number and a total each, that are right. A line is
    right if its number is the answer's and its total is the last digit of the completion's total before it plus that
    number, so one mistake costs one line. Lines from a broken one on are wrong. A completion of another length than the
    answer counts half.
    """
    expected, right, before = lines_of(answer), 0, 0
    for (number, total), (right_number, _) in zip(lines_of(completion), expected, strict=False):
        right += number == right_number and total == (before + number) % 10
        before = total
    return right / len(expected) * (1.0 if len(completion) == len(answer) else 0.5)


def lines_of(text: str) -> list[tuple[int, int]]:
    """The lines of a scratchpad, up to the first that is broken: `lines_of("3325")` is `[(3, 3), (2, 5)]`."""
    lines = []
    for start in range(0, len(text) - 1, 2):
        line = text[start : start + 2]
        if not (line.isascii() and line.isdigit()):
            break
        lines.append((int(line[0]), int(line[1])))
    return lines


def _written(numbers: Sequence[int], steps: Sequence[int]) -> str:
    """The scratchpad of a list whose total grows by `steps`."""
    totals = itertools.accumulate(steps)
    return "".join(f"{number}{total % 10}" for number, total in zip(numbers, totals, strict=True))

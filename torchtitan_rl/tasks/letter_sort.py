"""Sort the letters of a word: a family that a tiny model learns in minutes on a laptop."""

from __future__ import annotations

import itertools
import random
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torchtitan_rl.tasks.family import check_index, check_split, stable_hash
from torchtitan_rl.types import Task

__all__ = ["LetterSort", "hinted", "made_up_answer", "partial_credit"]


class LetterSort:
    """Prompt `szyci=`, answer `cisyz`: letters that all differ, to be put in alphabetical order.

    The train split is endless. A hash of a task's sorted letters decides the split (5% test, 5% validation), so two
    orders of the same letters never fall into different splits. Raises ValueError when the allowed lengths give a split
    fewer different tasks than the config asks for.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        min_letters: int = 4
        """Fewest letters in a task; lengths are drawn evenly from min_letters to max_letters."""
        max_letters: int = 6
        """Most letters in a task, 26 at most."""
        correct_demonstrations: float = 0.0
        """Fraction of the train demonstrations that are right. The others show only the form of an answer: the letters
        in a random order that is never the right order."""
        hinted_demonstrations: float = 0.0
        """Fraction of the train tasks whose prompt holds a hint, as in `szyci:yzisc=`, and whose demonstration copies
        the hint. The hint is a random order, so such demonstrations teach copying and not sorting: for a warm start
        (`supervised.task`) before self-distillation, in which the snapshot's prompt hints the answer; see `hinted`."""
        pairs: bool = False
        """Whether tasks carry a preference pair: the right order as `chosen`, as `rejected` the right order with two
        random letters exchanged. Such pairs teach each place of an answer: to tell a random order from the right one,
        a single place is enough."""
        num_validation: int = 256
        """Number of different validation tasks."""
        num_test: int = 512
        """Number of different test tasks."""
        seed: int = 0
        """Decides which tasks exist and their splits; the run's own seed chooses among the train tasks."""
        shuffle_rewards: bool = False
        """A control experiment: True permutes the rewards of a group at random, so that nothing can be learned."""
        reward: Callable | None = None
        """A reward function of (task, completions) in place of the family's; None: the family's."""

        def __post_init__(self) -> None:
            if not 1 <= self.min_letters <= self.max_letters <= 26:
                raise ValueError(
                    f"letter_sort.min_letters={self.min_letters}, max_letters={self.max_letters}: do not fit; "
                    "choose 1 <= min_letters <= max_letters <= 26"
                )
            for name in ("correct_demonstrations", "hinted_demonstrations"):
                if not 0.0 <= getattr(self, name) <= 1.0:
                    raise ValueError(f"letter_sort.{name}={getattr(self, name)}: is not a fraction; use 0 to 1")
            if self.pairs and self.min_letters == 1:
                raise ValueError(
                    "letter_sort.min_letters=1: a single letter has no wrong order for a pair; use 2, or pairs=False"
                )
            if self.shuffle_rewards and self.reward is not None:
                raise ValueError(
                    "letter_sort.shuffle_rewards=True: shuffles the family's own rewards only; leave reward unset"
                )

        def build(self) -> LetterSort:
            return LetterSort(self)

    name = "letter_sort"

    def __init__(self, config: LetterSort.Config) -> None:
        self.config = config
        self.reward_fn = config.reward

    def num_tasks(self, split: str) -> int | None:
        check_split(split)
        return {"train": None, "validation": self.config.num_validation, "test": self.config.num_test}[split]

    def task(self, split: str, index: int) -> Task:
        """Only train tasks carry a demonstration; with `pairs` the tasks of every split carry a pair."""
        check_index(self, split, index)
        demonstration, prompt, rejected = None, None, None
        if split == "train":
            rng = random.Random(stable_hash(self.config.seed, split, index))
            word = self._draw_train(rng)
            correct = rng.random() < self.config.correct_demonstrations
            demonstration = "".join(sorted(word)) if correct else self._wrong_order(rng, word)
            if rng.random() < self.config.hinted_demonstrations:
                prompt = hinted(word, demonstration)
        else:
            word = self._held_out[split][index]
        answer = "".join(sorted(word))
        if self.config.pairs:
            rejected = _exchanged(random.Random(stable_hash(self.config.seed, split, index, "rejected")), answer)
        return Task(
            id=f"{self.name}/{split}/{index}",
            prompt=prompt or f"{word}=",
            answer=answer,
            demonstration=demonstration,
            chosen=answer if self.config.pairs else None,
            rejected=rejected,
        )

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        """1 for the right answer; otherwise up to 0.5 for letters kept and pairs in order, see `partial_credit`."""
        if self.reward_fn is not None:
            return self.reward_fn(task, completions)
        rewards_G = [
            1.0 if completion == task.answer else 0.5 * partial_credit(completion, task.answer)
            for completion in completions
        ]
        return self._shuffled(rewards_G, task) if self.config.shuffle_rewards else rewards_G

    def _shuffled(self, rewards_G: list[float], task: Task) -> list[float]:
        # Every permutation is equally likely, the identity included: otherwise an advantage would depend on its
        # completion on average.
        random.Random(stable_hash(self.config.seed, "shuffle_rewards", task.id)).shuffle(rewards_G)
        return rewards_G

    def _wrong_order(self, rng: random.Random, word: str) -> str:
        letters = list(word)
        rng.shuffle(letters)
        # A single letter has one order only, the right one.
        while len(letters) > 1 and letters == sorted(letters):
            rng.shuffle(letters)
        return "".join(letters)

    def _draw(self, rng: random.Random) -> str:
        num_letters = rng.randint(self.config.min_letters, self.config.max_letters)
        return "".join(rng.sample(string.ascii_lowercase, num_letters))

    def _draw_train(self, rng: random.Random) -> str:
        for _ in range(1000):  # nine draws in ten are train tasks unless hardly any letters are allowed
            word = self._draw(rng)
            if self._split_of(word) == "train":
                return word
        raise ValueError(self._too_few("train", 0))

    @cached_property
    def _held_out(self) -> dict[str, list[str]]:
        """The words of validation and test; no two words have the same set of letters."""
        words = {"validation": {}, "test": {}}
        for split, by_letters in words.items():
            num_tasks = self.num_tasks(split)
            rng = random.Random(stable_hash(self.config.seed, split))
            # One draw in twenty belongs to the split; after many more draws in vain no new task is left in it.
            for _ in range(10_000 + 200 * num_tasks):
                if len(by_letters) == num_tasks:
                    break
                word = self._draw(rng)
                if self._split_of(word) == split:
                    by_letters.setdefault("".join(sorted(word)), word)
            if len(by_letters) < num_tasks:
                raise ValueError(self._too_few(split, len(by_letters)))
        return {split: list(by_letters.values()) for split, by_letters in words.items()}

    def _split_of(self, word: str) -> str:
        percent = stable_hash(self.config.seed, "split", "".join(sorted(word))) % 100
        return "test" if percent < 5 else "validation" if percent < 10 else "train"

    def _too_few(self, split: str, num_found: int) -> str:
        count = f"only {num_found} different tasks" if num_found else "no task"
        remedy = "" if split == "train" else f"lower num_{split} or "
        return (
            f"letter_sort.min_letters={self.config.min_letters}, max_letters={self.config.max_letters}: "
            f"gives {split} {count}; {remedy}allow more lengths"
        )


def _exchanged(rng: random.Random, answer: str) -> str:
    letters = list(answer)
    first, second = rng.sample(range(len(letters)), 2)
    letters[first], letters[second] = letters[second], letters[first]
    return "".join(letters)


def partial_credit(completion: str, answer: str) -> float:
    """A score from 0 to 1 for the order of a completion's letters and for their agreement with the answer's letters.

    The share of letter pairs in order, times the square of (letters in common / longer length), so that omitting,
    adding or repeating letters does not pay. Fewer than two letters have no pair: 0.
    """
    pairs = [first <= second for first, second in itertools.combinations(completion, 2)]
    if not pairs:
        return 0.0
    in_common = sum((Counter(completion) & Counter(answer)).values())
    return sum(pairs) / len(pairs) * (in_common / max(len(completion), len(answer))) ** 2


def hinted(word: str, hint: str) -> str:
    """The prompt of a task with a hint: `hinted("szyci", "cisyz")` is `"szyci:cisyz="`."""
    return f"{word}:{hint}="


def made_up_answer(task: Task, rng: random.Random) -> str:
    """An answer for a judge or a reward model to learn from: right, or with neighbours exchanged, in another order, cut
    short (perhaps to nothing), with a letter repeated, or with some letters or all replaced, half of these in order.

    Letters in order that are not the task's are there because a policy finds them where a model was never shown them.
    """
    letters, kind = list(task.answer), rng.randrange(8)
    place = rng.randrange(len(letters))
    if kind == 2:
        letters[place : place + 2] = reversed(letters[place : place + 2])
    elif kind == 3:
        rng.shuffle(letters)
    elif kind == 4:
        del letters[place:]
    elif kind == 5:
        letters.insert(place, rng.choice(letters))
    elif kind > 5:
        for changed in rng.sample(range(len(letters)), rng.randint(1, len(letters))):
            letters[changed] = rng.choice(string.ascii_lowercase)
        rng.shuffle(letters) if rng.random() < 0.5 else letters.sort()
    return "".join(letters)

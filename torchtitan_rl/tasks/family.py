"""The interface of a task family, and the order in which a run visits tasks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torchtitan_rl.types import Task

__all__ = [
    "SPLITS",
    "DataIdentity",
    "TaskFamily",
    "TaskSource",
    "check_index",
    "check_split",
    "source_of",
    "stable_hash",
    "stream",
]

SPLITS = ("train", "validation", "test")


class TaskFamily(Protocol):
    """Data, environment and reward together. The three splits share no task.

    Three more methods are optional, and `Mixture` has all three. `source(split, seed)` gives the family's own order of
    tasks (see `source_of`). `reward_for(task)` gives a reward function per task (see `judging.reward_function`).
    `environment(task)` makes the environment of a task of several turns (see `tasks/env.py`; None: one turn). A field
    is optional too: `reward_fn`, the config's reward function, which judges in place of `reward`; None: the config has
    none.

    Example: `LetterSort(LetterSort.Config()).task("train", 7).prompt == "uqmhvf="`.
    """

    name: str

    def num_tasks(self, split: str) -> int | None:
        """Number of tasks in a split; None: an endless split, whose tasks are generated on demand."""

    def task(self, split: str, index: int) -> Task:
        """The task of this index: a function of the config, `split` and `index` alone, in every process."""

    def reward(self, task: Task, completions: list[str]) -> Sequence[float] | Awaitable[Sequence[float]]:
        """One reward per completion; every completion is an attempt at `task`. May be an async function. In a `Mixture`
        the task's id begins with the family's name there: what a reward needs to know belongs in `answer`."""


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """Which rows a family's tasks are made of."""

    name: str
    """The setting that names the rows and its value, for messages."""
    digest: str
    """A hash of the rows."""


class TaskSource:
    """Hands out the tasks of one split in a run's order, and can be resumed.

    A finite split is visited in epochs, each a permutation made from `(seed, epoch)`, so no task repeats within an
    epoch. An endless split is visited by index from `seed * 2**32`, so runs with other seeds see other tasks.
    """

    def __init__(self, family: TaskFamily, split: str, seed: int, data: DataIdentity | None = None) -> None:
        """`data` are the rows that the tasks are made of: the state names them, and a run that is resumed goes on with
        the same rows alone. None: the family's config says all about its tasks. Raises ValueError for an empty split
        and for a negative seed."""
        check_split(split)
        if seed < 0:
            raise ValueError(f"seed={seed}: must not be negative; use 0 or more")
        self.family, self.split, self.seed, self._data = family, split, seed, data
        self.num_tasks = family.num_tasks(split)
        if self.num_tasks is not None and self.num_tasks < 1:
            raise ValueError(
                f"task.{split}: {self.num_tasks} tasks in {family.name}; give this split data, or use another split"
            )
        self.epoch = 0
        self.cursor = 0
        self._order = self._epoch_order()

    def next(self, n: int) -> list[Task]:
        """The next `n` tasks; the next epoch follows when an epoch ends."""
        return [self.family.task(self.split, self._next_index()) for _ in range(n)]

    def replacement(self, slot: int, round: int) -> Task:
        """The task that fills slot `slot` in round `round` > 0: a function of the seed, the slot and the round. The run
        may visit the same task elsewhere."""
        drawn = stable_hash(self.seed, self.split, "replacement", slot, round)
        if self.num_tasks is None:  # the second half of this seed's range of indices
            return self.family.task(self.split, self.seed * 2**32 + 2**31 + drawn % 2**31)
        return self.family.task(self.split, drawn % self.num_tasks)

    def state_dict(self) -> dict[str, Any]:
        """The source's position; everything else follows from the constructor's arguments."""
        position: dict[str, Any] = {"epoch": self.epoch, "cursor": self.cursor}
        return position if self._data is None else {**position, "data": self._data.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict()`. Raises ValueError for a state of other data, and if the split now has fewer
        tasks than were visited."""
        # A state without a hash was written before this family's rows were hashed.
        if self._data is not None and (digest := state.get("data", self._data.digest)) != self._data.digest:
            raise ValueError(
                f"{self._data.name}: rows are not those that the run started with (hash {digest}, now "
                f"{self._data.digest}); put them back, or start a new run"
            )
        if self.num_tasks is not None and state["cursor"] > self.num_tasks:
            raise ValueError(
                f"task.{self.split}.cursor={state['cursor']}: the split now has {self.num_tasks} tasks; "
                "resume with the data the run started with"
            )
        self.epoch, self.cursor = state["epoch"], state["cursor"]
        self._order = self._epoch_order()

    def _next_index(self) -> int:
        if self._order is None:
            index = self.seed * 2**32 + self.cursor
        else:
            if self.cursor == len(self._order):
                self.epoch, self.cursor = self.epoch + 1, 0
                self._order = self._epoch_order()
            index = self._order[self.cursor]
        self.cursor += 1
        return index

    def _epoch_order(self) -> list[int] | None:
        if self.num_tasks is None:
            return None
        order = list(range(self.num_tasks))
        random.Random(stable_hash(self.seed, self.split, self.epoch)).shuffle(order)
        return order


def source_of(family: TaskFamily, split: str, seed: int) -> Any:
    """The family's own `source(split, seed)` where it has that method, as a mixture does, else a `TaskSource`."""
    own = getattr(family, "source", None)
    return own(split, seed) if own is not None else TaskSource(family, split, seed)


def check_split(split: str) -> None:
    """Raises ValueError unless `split` is one of `SPLITS`."""
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: is not a split; use one of {', '.join(SPLITS)}")


def check_index(family: TaskFamily, split: str, index: int) -> None:
    """Raises IndexError unless the split has a task of this index, ValueError if there is no such split."""
    check_split(split)
    num_tasks = family.num_tasks(split)
    if index < 0 or (num_tasks is not None and index >= num_tasks):
        size = "no end" if num_tasks is None else f"{num_tasks} tasks"
        raise IndexError(f"index={index}: {family.name} has {size} in {split}, counted from 0; use an index within")


def stream(*parts: Any) -> int:
    """The 63-bit seed of the sampling stream named by `parts`."""
    return stable_hash(*parts) >> 1


def stable_hash(*parts: Any) -> int:
    """A 64-bit hash of `parts`, the same in every process; Python's own hash of a string differs between processes."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

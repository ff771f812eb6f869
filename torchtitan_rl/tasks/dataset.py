"""Tasks from data that a user has: a JSONL, Parquet or CSV file, or an object of the `datasets` package."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_rl.tasks import row_files, splits
from torchtitan_rl.tasks.decimals import plain_decimal
from torchtitan_rl.tasks.family import SPLITS, DataIdentity, TaskSource, check_index, check_split, stable_hash
from torchtitan_rl.tasks.row_tasks import RowTasks
from torchtitan_rl.types import Task

__all__ = ["Dataset"]

logger = logging.getLogger(__name__)


class Dataset:
    """One task per row. All rows are read and checked when the family is built.

    The reward is an exact match with the answer unless the config has another. Raises ValueError for files, columns and
    rows that do not fit, with the near names or the row's number (counted from 1), and for splits with common prompts.

    Example: `Dataset.Config(train="train.jsonl", test="test.jsonl", prompt="question", system="Be brief.")`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        train: str = "train"
        """A .jsonl, .json, .parquet or .csv file of train rows; with `data`, the name of the split of train rows."""
        validation: str | None = None
        """The same for validation; None: the split `validation` of `data`, or else rows drawn from train."""
        test: str | None = None
        """The same for the test; None: the split `test` of `data`, or else rows drawn from train."""
        data: Any = None
        """A `datasets.Dataset` (train rows) or `DatasetDict`, or a function that returns one; None: rows are in files.
        Example: `functools.partial(datasets.load_dataset, "openai/gsm8k", "main")`."""
        prompt: str = "prompt"
        """Column of the prompt: text, or a list of chat messages. A dot leads into a column, as in `extra.question`."""
        chat: bool = True
        """Whether a prompt of text is a user's message for the chat template; False: the policy reads it as it is."""
        system: str | None = None
        """A system message for every task; None: none."""
        system_column: str | None = None
        """Column of each row's system message; None: none."""
        answer: str | None = "answer"
        """Column of the answer, which every row must have; None: rows have none, and `reward` needs none."""
        demonstration: str | None = None
        """Column of the completion to imitate, which every train row must have; None: there are none."""
        chosen: str | None = None
        """Column of the better completion of a preference pair: text, or a list of one assistant's message. Every train
        row must have it; another split that has both columns has pairs too. None: there are no pairs."""
        rejected: str | None = None
        """Column of the worse completion of the pair, as `chosen`; the texts of a row must differ."""
        from_row: Callable | None = None
        """A function of a row that returns a dict with `prompt` and, where there are any, `system`, `answer`,
        `demonstration`, `chosen` and `rejected`, in place of the columns; None: the columns."""
        reward: Callable | None = None
        """A reward function of (task, completions); None: 1 for a completion that is the answer, else 0."""
        validation_fraction: float = 0.05
        """Share of the train rows' different prompts that is drawn for validation where no rows are given for it."""
        test_fraction: float = 0.05
        """Share of the train rows' different prompts that is drawn for the test where no rows are given for it."""
        overlap: Literal["refuse", "drop", "allow"] = "refuse"
        """What follows when a prompt is in two splits: an error; its rows are left out of train before validation, of
        validation before test; or nothing but a warning."""
        seed: int = 0
        """Decides which rows are drawn; the run's own seed decides the order of train tasks."""

        def __post_init__(self) -> None:
            if isinstance(self.data, Mapping) or hasattr(self.data, "column_names"):
                self.data = row_files.InMemory(self.data)
            if self.system is not None and self.system_column is not None:
                raise ValueError(f"dataset.system_column={self.system_column!r}: dataset.system is set too; keep one")
            if not self.chat and (self.system is not None or self.system_column is not None):
                raise ValueError("dataset.chat=False: a prompt of plain text has no system message; set chat=True")
            if self.answer is None and self.reward is None and self.from_row is None:
                raise ValueError(
                    "dataset.answer=None: the reward compares with it; name a column, or give dataset.reward"
                )
            if (self.chosen is None) != (self.rejected is None):
                missing = "chosen" if self.chosen is None else "rejected"
                raise ValueError(f"dataset.{missing}=None: a pair has two completions; name the column of the other")
            for name in ("validation_fraction", "test_fraction"):
                if not 0.0 < getattr(self, name) < 1.0:
                    raise ValueError(f"dataset.{name}={getattr(self, name)}: is no share of the rows; use 0 < x < 1")

        def build(self) -> Dataset:
            return Dataset(self)

    name = "dataset"

    def __init__(self, config: Dataset.Config) -> None:
        self.config = config
        self.reward_fn = config.reward
        loaded = {split: RowTasks(config, split, rows, name) for split, rows, name in _tables(config)}
        digest, keys = hashlib.blake2b(digest_size=8), {}
        for split, rows in loaded.items():
            keys[split] = [_key(item, digest, rows.row_name(position)) for position, item in enumerate(rows)]
        self.digest = digest.hexdigest()
        """Hash of all prompts, answers, demonstrations and pairs."""
        drawn = {s: getattr(config, f"{s}_fraction") for s in SPLITS[1:] if s not in loaded}
        positions = {split: list(range(len(keys[split]))) for split in loaded}
        if drawn:
            positions |= splits.draw(keys["train"], drawn, config.seed)
        self._rows = {split: loaded.get(split, loaded["train"]) for split in SPLITS}
        self._positions = self._without_overlaps(keys, positions)

    def num_tasks(self, split: str) -> int:
        check_split(split)
        return len(self._positions[split])

    def task(self, split: str, index: int) -> Task:
        """Only train tasks carry a demonstration."""
        check_index(self, split, index)
        item = self._rows[split].at(self._positions[split][index])
        if split != "train":
            item["demonstration"] = None
        return Task(id=f"{self.name}/{split}/{index}", **item)

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        """1 for a completion that is the answer but for white space around either, else 0."""
        if self.reward_fn is not None:
            return self.reward_fn(task, completions)
        answer = (plain_decimal(task.answer) if isinstance(task.answer, float) else str(task.answer)).strip()
        return [float(completion.strip() == answer) for completion in completions]

    def source(self, split: str, seed: int) -> TaskSource:
        """A source whose state names the data, so that no run goes on with other data."""
        return TaskSource(self, split, seed, DataIdentity(f"dataset.train={self.config.train!r}", self.digest))

    def _without_overlaps(self, keys: dict[str, list[int]], positions: dict[str, list[int]]) -> dict[str, list[int]]:
        """`positions` without the rows that `config.overlap` leaves out; warns of repeated rows and of rows that
        splits share."""
        keys_of = {s: [keys.get(s, keys["train"])[position] for position in positions[s]] for s in SPLITS}
        for split in SPLITS:
            if repeated := splits.num_duplicates(keys_of[split]):
                total = len(keys_of[split])
                _warn_once(f"dataset: {repeated} of {total} {split} rows have the prompt of an earlier {split} row")
        left_out: dict[str, set[int]] = {split: set() for split in SPLITS}
        for overlap in splits.overlaps(keys_of):
            rows, position = self._rows[overlap.split], positions[overlap.split][overlap.positions[0]]
            common = (
                f"{len(overlap.positions)} of {len(keys_of[overlap.split])} {overlap.split} rows have a prompt of "
                f"{overlap.held_out}, the first is {rows.row_name(position)}"
            )
            if self.config.overlap == "refuse":
                raise ValueError(
                    f"dataset.overlap='refuse': {common}; mend the data, or set 'drop' to leave such rows out of "
                    f"{overlap.split}, or 'allow'"
                )
            dropped = self.config.overlap == "drop"
            _warn_once(
                f"dataset: {common}; {'they are left out' if dropped else 'its scores count what was trained on'}"
            )
            left_out[overlap.split].update(overlap.positions if dropped else ())
        return {s: [p for i, p in enumerate(positions[s]) if i not in left_out[s]] for s in SPLITS}


def _tables(config: Dataset.Config) -> Iterator[tuple[str, Any, str]]:
    """(split, rows, their name for messages) of every split whose rows are given."""
    name_by_split = {split: getattr(config, split) for split in SPLITS}
    if config.data is None:
        for split, path in name_by_split.items():
            if path is not None:
                yield split, row_files.read_file(path, f"dataset.{split}"), path
        return
    data = config.data.data if isinstance(config.data, row_files.InMemory) else _returned(config.data)
    tables = data if isinstance(data, Mapping) else {config.train: data}
    for split, name in name_by_split.items():
        if name is None and split in tables and split not in name_by_split.values():
            name = split
        if name is None:
            continue
        if name not in tables:
            has = f"has the splits {', '.join(tables)}" if tables is data else "is one Dataset, of train rows"
            raise ValueError(
                f"dataset.{split}={name!r}: is no split of dataset.data, which {has}; name one"
                f"{row_files.near(name, tables)}"
            )
        if not hasattr(tables[name], "num_rows"):
            kind = type(tables[name]).__name__
            raise ValueError(f"dataset.data: its split {name!r} is a {kind}; give a datasets.Dataset, no stream")
        if len(tables[name]) == 0:
            raise ValueError(f"dataset.{split}={name!r}: has no rows; give rows, or another split")
        yield split, tables[name], f"data[{name!r}]" if tables is data else "data"


def _returned(load: Any) -> Any:
    if not callable(load):
        raise ValueError(
            f"dataset.data={load!r}: is no data; give a datasets.Dataset, a DatasetDict or a function that returns "
            "one; files are named in dataset.train, .validation and .test"
        )
    try:
        return load()
    except Exception as error:  # whatever loading raises: no network, no such data set, a mistake in the function
        raise RuntimeError(
            f"dataset.data: its function raised {row_files.one_line(error)}; mend it, or check the name and the network"
        ) from error


def _key(item: dict[str, Any], digest: Any, row_name: str) -> int:
    """Hash of an item's prompt; adds the item to `digest`. Raises ValueError for an item that has no hash which is the
    same in every process: a run with it could not be resumed."""
    parts = [item["answer"], item["demonstration"]]
    if item["chosen"] is not None:
        parts += [item["chosen"], item["rejected"]]
    try:
        prompt = json.dumps(item["prompt"], sort_keys=True)
        rest = json.dumps(parts, sort_keys=True, default=_repr)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"dataset.train: the prompt or the answer of {row_name} cannot be hashed, as a resumed run needs it "
            f"({error}); give text, numbers, lists, and dicts with keys of one kind"
        ) from error
    digest.update(f"{prompt}\n{rest}\n".encode())
    return stable_hash(prompt)


def _repr(value: Any) -> str:
    """The `repr` of a value that JSON has no form for, such as a date. Raises TypeError for one that differs between
    processes."""
    if isinstance(value, set | frozenset) or " at 0x" in repr(value):
        raise TypeError(f"a value of type {type(value).__name__} reads differently in every process")
    return repr(value)


@functools.cache
def _warn_once(message: str) -> None:
    """Warns; the same message is said once per process, however often a family of the same data is built."""
    logger.warning("%s", message)

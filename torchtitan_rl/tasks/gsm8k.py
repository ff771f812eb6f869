"""Grade-school word problems whose answer is a number: GSM8K, or files of the same form.

Cobbe et al., "Training Verifiers to Solve Math Word Problems", https://arxiv.org/abs/2110.14168
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from torchtitan_rl.tasks.family import DataIdentity, TaskSource, check_index, check_split, stable_hash
from torchtitan_rl.tasks.row_files import one_line, read_file
from torchtitan_rl.types import Task

__all__ = ["Gsm8k", "final_number"]

INSTRUCTION = (
    "Solve the problem step by step. End with the final answer, a number alone, on a line of its own: #### <number>"
)


class Gsm8k:
    """Rows with a `question` and an `answer` that ends with `#### <number>`; read on first use.

    The last rows of the train file are the validation split; the train split lacks them. Raises ValueError for files
    that are missing or of another form and for rows that make no task, with the row's number (counted from 1),
    RuntimeError when the hub cannot be reached.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        path: str = "openai/gsm8k"
        """Name of a data set on the hub, or a local .jsonl or .parquet file of train rows."""
        subset: str | None = "main"
        """Configuration of the hub's data set; None: the data set has none, as with local files."""
        test_path: str | None = None
        """A local file of test rows; None: the test rows of the hub's data set. A local data set needs a file."""
        num_validation: int = 256
        """Rows taken from the end of train for validation."""
        instruction: str = INSTRUCTION
        """The system message."""
        reward: Callable | None = None
        """A reward function of (task, completions) in place of the family's; None: the family's."""

        def build(self) -> Gsm8k:
            return Gsm8k(self)

    name = "gsm8k"

    def __init__(self, config: Gsm8k.Config) -> None:
        self.config = config
        self._rows = cache(self._load)  # by file: "train" or "test"
        self.reward_fn = config.reward

    def num_tasks(self, split: str) -> int:
        check_split(split)
        if split == "test":
            return len(self._rows("test"))
        num_rows, num_validation = len(self._rows("train")), self.config.num_validation
        if not 0 <= num_validation < num_rows:
            raise ValueError(
                f"gsm8k.num_validation={num_validation}: cannot be taken from the {num_rows} rows of "
                f"{self.config.path}; choose 0 to {max(0, num_rows - 1)}"
            )
        return num_validation if split == "validation" else num_rows - num_validation

    def task(self, split: str, index: int) -> Task:
        """`answer` is the number as text; `demonstration`, on train tasks, is the worked solution."""
        check_index(self, split, index)
        row = self._rows("test" if split == "test" else "train")[
            index + self.num_tasks("train") if split == "validation" else index
        ]
        solution, _, answer = row["answer"].rpartition("####")
        # <<48/2=24>> are notes for a calculator that the policy does not have.
        demonstration = re.sub(r"<<[^<>]*>>", "", solution).strip() + f"\n#### {answer.strip()}"
        return Task(
            id=f"{self.name}/{split}/{index}",
            prompt=[
                {"role": "system", "content": self.config.instruction},
                {"role": "user", "content": row["question"]},
            ],
            answer=answer.strip(),
            demonstration=demonstration if split == "train" else None,
        )

    def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        """1 where the final number equals the answer's, however either is written; else 0."""
        if self.reward_fn is not None:
            return self.reward_fn(task, completions)
        answer = _value(task.answer)
        return [float(final_number(completion) == answer) for completion in completions]

    def source(self, split: str, seed: int) -> TaskSource:
        """A source whose state names the rows, so that no run goes on with others."""
        rows = self._rows("test" if split == "test" else "train")
        digest = f"{stable_hash([(row['question'], row['answer']) for row in rows]):016x}"
        field = "test_path" if split == "test" and self.config.test_path is not None else "path"
        return TaskSource(self, split, seed, DataIdentity(f"gsm8k.{field}={getattr(self.config, field)!r}", digest))

    def _load(self, file: str) -> Any:
        """Rows of the "train" or the "test" file, as a sequence of dicts."""
        path, field = self.config.path, "path"
        is_file = path.endswith((".json", ".jsonl", ".parquet"))
        if file == "test" and (is_file or self.config.test_path is not None):
            path, field, is_file = self.config.test_path, "test_path", True
            if path is None:
                raise ValueError("gsm8k.test_path=None: a local data set has no test rows; name a file of them")
            if path == self.config.path:
                raise ValueError(f"gsm8k.test_path={path!r}: is the train file; name another file")
        rows = read_file(path, f"gsm8k.{field}") if is_file else _read_hub(path, self.config.subset, file)
        missing = {"question", "answer"} - set(rows.column_names)
        if missing:
            raise ValueError(f"gsm8k.{field}={path!r}: has no column {min(missing)!r}; give question and answer")
        for number, row in enumerate(rows, start=1):
            where = f"gsm8k.{field}={path!r}: row {number}" + ("" if is_file else f" of {file}")
            if not isinstance(row["question"], str) or not row["question"].strip():
                raise ValueError(f"{where} has no question; fill it in or drop the row")
            _, marker, answer = row["answer"].rpartition("####") if isinstance(row["answer"], str) else ("", "", "")
            if not marker or _value(answer) is None:
                raise ValueError(f"{where} has no answer that ends with '#### <number>'; mend or drop the row")
        return rows


def _read_hub(path: str, subset: str | None, split: str) -> Any:
    import datasets  # slow to import

    try:
        return datasets.load_dataset(path, subset, split=split)
    except Exception as error:  # no network, no such data set, ...: a dozen types in three libraries
        raise RuntimeError(
            f"gsm8k.path={path!r}: could not be loaded from the hub ({one_line(error)}); check the name and the "
            "network, or name local files in gsm8k.path and gsm8k.test_path"
        ) from error


# A minus sign, not a dash between two numbers; currency; digits, alone or in groups of three; maybe an exponent; maybe
# a denominator, or the fraction of a mixed number such as 1 1/2.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])-)?(?:[$€£](?P<inner_sign>-)?)?"
    r"(?P<digits>(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|(?<![0-9])[0-9]++(?!,[0-9]))(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,2}(?!\w))?)"
    r"(?:\s?/\s?(?P<denominator>[0-9]+)|[ ](?P<numerator>[0-9]++)/(?P<denominator_after>[0-9]++))?"
)
_BOX = re.compile(r"\\boxed\s?\{((?:[^{}]|\{[^{}]*\})*)\}")
_MARKER = re.compile(
    r"####(?:[^\w\n]{0,8}+(?i:(?:the )?(?:final )?answer(?: is)?)(?!\w))?[^\w\n]{0,8}?("
    + re.sub(r"\?P<\w+>", "", _NUMBER.pattern)
    + ")"
)
# \frac{1}{2}, \frac12; a minus sign with a blank where nothing to subtract from stands before it.
_FRACTION = re.compile(r"(\d?)\\[dt]?frac\s?(?:\{([^{}]*)\}|(\d))\s?(?:\{\s?(-?)([^{}]*)\}|(\d))")
_SPACED_MINUS = re.compile(r"(=|####|\\boxed\s?\{)([ \t*($]{0,8})-[ \t]{1,8}(?=[0-9.$€£])")
_MAX_DIGITS = 100


def final_number(text: str) -> Fraction | None:
    r"""The number a solution ends with: after the last `####`, where "the final answer is" may stand between, or in the
    last `\boxed{}`, else the last of the text.

    Example: `final_number("So she pays #### $1,000.50 in all") == Fraction(2001, 2)`. None where there is no number.
    """
    text = _FRACTION.sub(_plain_fraction, text)
    text = re.sub(r"-\s?\\(?:text|mathrm|mathbf|textbf)\{\s?([^{}]*)\}", r"-\1", text)
    for written, plain in {"{,}": ",", "\\$": "$", "\\,": "", "\\!": "", "\u2212": "-"}.items():
        text = text.replace(written, plain)
    text = _SPACED_MINUS.sub(r"\1\2-", text)
    marked = {match.start(): match.group(1) for match in _MARKER.finditer(text)}
    for match in _BOX.finditer(text):
        # \boxed{x = 5} means 5.
        if _NUMBER.search(content := match.group(1).rpartition("=")[2]):
            marked[match.start()] = content
    if marked:
        return _value(marked[max(marked)])
    numbers = list(_NUMBER.finditer(text))
    return _parse(numbers[-1]) if numbers else None


def _plain_fraction(match: re.Match) -> str:
    r"""`1/2` for `\frac{1}{2}`, ` 1/2` behind a digit, `-1/2` for `\frac{1}{-2}`."""
    whole, above, digit_above, sign, below, digit_below = (group or "" for group in match.groups())
    above = above + digit_above
    if sign:
        above = above.strip().removeprefix("-") if above.strip().startswith("-") else f"-{above.strip()}"
    return f"{whole}{' ' if whole else ''}{above}/{below}{digit_below}"


def _value(text: str) -> Fraction | None:
    """The first number of `text`."""
    match = _NUMBER.search(text)
    return _parse(match) if match else None


def _parse(match: re.Match) -> Fraction | None:
    digits, denominator = match["digits"].replace(",", ""), match["denominator"] or "1"
    # Of the fraction after a whole number.
    numerator, denominator_after = match["numerator"] or "0", match["denominator_after"] or "1"
    # Python refuses to read integers of thousands of digits, which a policy may well write.
    if sum(map(len, (digits, denominator, numerator, denominator_after))) > _MAX_DIGITS or int(denominator) == 0:
        return None
    value = Fraction(digits) / int(denominator)
    if value.denominator == 1 and int(numerator) < int(
        denominator_after
    ):  # else two numbers side by side, of which this is the first
        value += Fraction(int(numerator), int(denominator_after))
    return -value if match["sign"] or match["inner_sign"] else value

"""From the rows of a table to what tasks hold: a prompt, an answer, a demonstration, a pair; every row is checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy

from torchtitan_rl.tasks.row_files import check_column, has_column, near, one_line, value_at

__all__ = ["RowTasks"]

_PARTS = ("prompt", "system", "answer", "demonstration", "chosen", "rejected")
_PAIR = ("chosen", "rejected")


class RowTasks:
    """The rows given for one split as dicts with `prompt`, `answer`, `demonstration`, `chosen` and `rejected`, by a
    `Dataset.Config`.

    Raises ValueError for a column that does not exist. Iterating, and `at`, raise ValueError for a row that makes no
    task, with its table and number.
    """

    def __init__(self, config: Any, split: str, rows: Any, name: str) -> None:
        self.config, self.rows, self.name = config, rows.with_format(None), name  # plain values, not arrays or tensors
        self.has_demonstrations = split == "train"
        self.columns = {"prompt": config.prompt, "system": config.system_column, "answer": config.answer}
        if self.has_demonstrations:
            self.columns["demonstration"] = config.demonstration
        features = rows.features or dict.fromkeys(rows.column_names)
        pair = [column for column in (config.chosen, config.rejected) if column is not None]
        if split == "train" or all(has_column(features, column) for column in pair):
            self.columns |= {"chosen": config.chosen, "rejected": config.rejected}
        if config.from_row is None:
            for part, column in self.columns.items():
                field = "system_column" if part == "system" else part
                if column is not None:
                    check_column(features, column, f"dataset.{field}", name)
        dtype = None if config.answer is None else getattr(value_at(features, config.answer), "dtype", None)
        self._has_short_answers = config.from_row is None and dtype == "float32"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for position, row in enumerate(self.rows):
            yield self._item(row, position)

    def at(self, position: int) -> dict[str, Any]:
        return self._item(self.rows[position], position)

    def row_name(self, position: int) -> str:
        """Example: `row 3 of train.jsonl`."""
        return f"row {position + 1} of {self.name}"

    def _item(self, row: dict[str, Any], position: int) -> dict[str, Any]:
        if self.config.from_row is not None:
            parts = self._parts_of(row, position)
        else:
            parts = {part: value_at(row, column) for part, column in self.columns.items() if column is not None}
        for part in self._needed():
            value = parts.get(part)
            if part == "answer" and self.config.reward is None and isinstance(value, str):
                value = value.strip()  # blanks alone would pay the empty completion
            if value is None or value == "" or value != value:  # NaN, as pandas writes what is missing
                raise self._error(part, position, f"has no {part}", self._remedy(part))
        answer, demonstration = parts.get("answer"), parts.get("demonstration")
        if self.config.reward is None and isinstance(answer, bool):
            raise self._error("answer", position, f"has the bool {answer}, which has no one text", "give text")
        if self._has_short_answers and isinstance(answer, float):
            answer = float(str(numpy.float32(answer)))  # 0.1 as the column has it, not 0.10000000149011612
        exact = 2**24 if self._has_short_answers else 2**53
        if self.config.reward is None and isinstance(answer, float) and abs(answer) >= exact:
            raise self._error("answer", position, f"has the float {answer}, which has lost digits", "give text")
        if self.config.reward is None and isinstance(answer, float) and answer.is_integer():
            answer = int(answer)  # beside fractions a column of numbers is one of floats, and `18` becomes 18.0
        if self.config.reward is None and not isinstance(answer, str | int | float):
            kind = type(answer).__name__
            raise self._error("answer", position, f"has a {kind}, which no text can equal", "give dataset.reward")
        if not isinstance(demonstration, str | list | None):
            kind = type(demonstration).__name__
            raise self._error("demonstration", position, f"has a {kind}", "give the text of a completion")
        pair = self._pair(parts, position)
        return {"prompt": self._prompt(parts, position), "answer": answer, "demonstration": demonstration, **pair}

    def _pair(self, parts: dict[str, Any], position: int) -> dict[str, str | None]:
        """`chosen` and `rejected` as text; None for both where the row has no pair."""
        pair = {part: self._completion(part, parts.get(part), position) for part in _PAIR}
        missing = [part for part in _PAIR if pair[part] is None]
        if len(missing) == 1:
            raise self._error(missing[0], position, f"has half of a pair, no {missing[0]}", "give both, or neither")
        if not missing and pair["chosen"] == pair["rejected"]:
            raise self._error("rejected", position, "has the same text as chosen", "drop the row")
        return pair

    def _completion(self, part: str, value: Any, position: int) -> str | None:
        """The text of a completion, which a conversation has as one message of the assistant."""
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping):
            if value[0].get("role") == "assistant":
                value = value[0].get("content")
        if isinstance(value, str | None):
            return value
        kind = f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, list) else "")
        remedy = "give text or one message of the assistant; dataset.from_row may take the prompt off a conversation"
        raise self._error(part, position, f"has {kind}", remedy)

    def _needed(self) -> list[str]:
        """What every row must have: the prompt, the columns that the config names, an answer to compare with."""
        if self.config.from_row is not None:
            return ["prompt"] if self.config.reward is not None else ["prompt", "answer"]
        named = [part for part, column in self.columns.items() if column is not None]
        return named if self.config.reward is not None or "answer" in named else [*named, "answer"]

    def _prompt(self, parts: dict[str, Any], position: int) -> str | list[dict[str, Any]]:
        prompt, system = parts["prompt"], parts.get("system") or self.config.system
        if isinstance(prompt, str):
            if not self.config.chat and system is None:
                return prompt
            messages = [{"role": "user", "content": prompt}]
        else:
            messages = self._messages(prompt, position)
        if system is None:
            return messages
        if not isinstance(system, str):
            raise self._error("system", position, f"has a {type(system).__name__}", "give text")
        if messages[0]["role"] == "system":
            raise self._error("prompt", position, "has a system message already", "leave out dataset.system")
        return [{"role": "system", "content": system}, *messages]

    def _messages(self, prompt: Any, position: int) -> list[dict[str, Any]]:
        """The messages without keys that are None: Arrow gives every message the keys of all."""
        wanted = "give text, or messages such as [{'role': 'user', 'content': 'Hi'}]"
        if not isinstance(prompt, list) or not prompt or not all(isinstance(message, Mapping) for message in prompt):
            raise self._error("prompt", position, f"has a {type(prompt).__name__}, not text or messages", wanted)
        messages = [{key: value for key, value in message.items() if value is not None} for message in prompt]
        for message in messages:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise self._error("prompt", position, f"has a message {str(message)[:60]} without role or text", wanted)
        if messages[-1]["role"] == "assistant":
            wanted = "end prompts before it; dataset.from_row may take it off as the demonstration"
            raise self._error("prompt", position, "ends with the assistant's message", wanted)
        return messages

    def _parts_of(self, row: dict[str, Any], position: int) -> dict[str, Any]:
        function: Any = self.config.from_row
        name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            task_parts = function(row)
        except Exception as error:
            where = f"{name} raised {one_line(error)} for {self.row_name(position)}"
            raise ValueError(f"dataset.from_row: {where}; mend the function") from error
        wanted = f"return a dict with {', '.join(_PARTS)}"
        if not isinstance(task_parts, dict):
            kind = type(task_parts).__name__
            raise ValueError(f"dataset.from_row: {name} returned a {kind} for {self.row_name(position)}; {wanted}")
        for part in task_parts:
            if part not in _PARTS:
                where = f"{name} returned {part!r} for {self.row_name(position)}"
                raise ValueError(f"dataset.from_row: {where}; {wanted}{near(str(part), _PARTS)}")
        return task_parts

    def _error(self, part: str, position: int, problem: str, remedy: str) -> ValueError:
        if self.config.from_row is not None:
            return ValueError(f"dataset.from_row: its {part} for {self.row_name(position)}: {problem}; {remedy}")
        field = "system_column" if part == "system" else part
        column = self.columns.get(part)
        return ValueError(f"dataset.{field}={column!r}: {self.row_name(position)} {problem}; {remedy}")

    def _remedy(self, part: str) -> str:
        drop = "fill it in or drop the row"
        return f"{drop}, or set dataset.answer=None and a dataset.reward that needs none" if part == "answer" else drop

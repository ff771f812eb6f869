"""Questions about the completions of a run's evaluations: lists with the wrong ones first, one task over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.rollout_parts import EVALUATION_COLUMNS
from torchtitan_rl.tools.table_index import Page, TableIndex, restrictions

__all__ = ["MOST_OF_TASK", "VERDICTS", "CompletionQuery", "Completions"]

VERDICTS = {"wrong": "not is_right", "right": "is_right", "failed": "failed <> ''"}
"""Verdict on a completion -> the SQL condition of the completions that have it."""
MOST_OF_TASK = 500
_EVALUATION = "step, name, split"


@dataclass(kw_only=True, slots=True)
class CompletionQuery:
    """Which completions. A step that is None, or a text that is empty, does not restrict."""

    text: str = ""
    """Contained in prompt or completion, whatever the case of the letters."""
    task: str = ""
    """Contained in the task's id."""
    name: str = ""
    """The task family, or the evaluation set."""
    split: str = ""
    step: int | None = None
    verdict: str = ""
    """One of `VERDICTS`."""
    page: int = 1
    per_page: int = 50


class Completions:
    """The completions of a run's evaluations that count, as `record.attempts.read_evaluations` counts them, also
    while the run goes on. Threads may share it.

    Example: `Completions(RunDir("runs/first")).find(CompletionQuery(split="test"))`.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._index = TableIndex(run_dir, "evaluations", EVALUATION_COLUMNS, "completions")

    def find(self, query: CompletionQuery) -> Page:
        """One page of the completions that a query asks for, with `is_right`: wrong ones before right ones, then by
        step, newest first, set, split, task and sample. Raises ValueError for a verdict that is not in `VERDICTS`."""
        restricted = _restrictions(query)
        order = "is_right, step desc, name, split, task_index, sample"
        with self._index.current():
            counted = _counted(self._index.counting())
            return self._index.page(
                restricted, order, among=counted, text=query.text, page=query.page, per_page=query.per_page
            )

    def of_task(self, name: str, split: str, task_id: str, length: int) -> list[dict[str, Any]]:
        """The completions of one task at the newest steps, by step and sample, with `length` characters of `prompt` and
        `text`; at most `MOST_OF_TASK`."""
        with self._index.current():
            rows = self._index.rows(
                f"select * from {_counted(self._index.counting())} where name = ? and split = ? and task_id = ? "
                f"order by step desc, sample desc limit {MOST_OF_TASK}",
                [name, split, task_id],
            )[::-1]
            self._index.preview(rows, length)
            return rows

    def whole(self, name: str, split: str, step: int, task_id: str, sample: int) -> dict[str, Any] | None:
        """The whole record of one completion; None where there is none."""
        with self._index.current():
            counted = _counted(self._index.counting())
            place = f"select part, line from {counted} where name = ? and split = ? and step = ? and task_id = ?"
            where = f"(part, line) in ({place} and sample = ?)"
            return self._index.whole(where, [name, split, step, task_id, sample])

    def counts(self) -> dict[tuple[int, str, str], tuple[int, int]]:
        """(step, name, split) of an evaluation -> how many of its completions are recorded, and how many are wrong."""
        with self._index.current():
            rows = self._index.rows(
                f"select {_EVALUATION}, count(*) as num, count(*) filter (not is_right) as wrong from "
                f"{_counted(self._index.counting())} group by {_EVALUATION} order by {_EVALUATION}"
            )
            return {(row["step"], row["name"], row["split"]): (row["num"], row["wrong"]) for row in rows}


def _counted(counting: str) -> str:
    """A relation of the records that count, with `is_right` in place of a `correct` that may be null."""
    return (
        f"(select *, coalesce(correct, false) as is_right from records where {counting} "
        f"qualify coalesce(attempt, 0) = max(coalesce(attempt, 0)) over (partition by {_EVALUATION}) "
        f"and row_number() over (partition by {_EVALUATION}, task_index, sample order by part desc, line desc) = 1)"
    )


def _restrictions(query: CompletionQuery) -> tuple[list[str], list[Any]]:
    """SQL conditions on the index, and their values."""
    if query.verdict and query.verdict not in VERDICTS:
        raise ValueError(f"verdict={query.verdict!r}: is no verdict; choose one of {', '.join(VERDICTS)}")
    conditions, values = restrictions(
        {
            "name = ?": query.name or None,
            "split = ?": query.split or None,
            "step = ?": query.step,
            "contains(lower(task_id), lower(?))": query.task or None,
        }
    )
    return [*conditions, VERDICTS.get(query.verdict, "true")], values

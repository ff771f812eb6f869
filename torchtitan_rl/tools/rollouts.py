"""Questions about a run's rollouts: lists, filters, text search, one rollout whole, its siblings.

An index in memory holds what lists are filtered and sorted by. Texts are searched where they lie, in Parquet; whatever
is per token is read for one rollout only. The run may be going on: each question sees the complete lines so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.rollout_parts import COLUMNS
from torchtitan_rl.tools.table_index import Page, TableIndex, restrictions

__all__ = ["SORTS", "Query", "Rollouts"]

SORTS = ("step", "reward", "advantage", "num_tokens", "num_turns", "task_id", "rollout_id")
"""What lists are sorted by."""
_MOST_COUNTED = 20_000
_REASONS = ("left_out", "finish_reason", "end_reason")


@dataclass(kw_only=True, slots=True)
class Query:
    """Which rollouts, in which order. A bound that is None, or a text that is empty, does not restrict."""

    text: str = ""
    """Contained in prompt or completion, whatever the case of the letters."""
    task: str = ""
    """Contained in the task's id."""
    group: str = ""
    """The group's id."""
    reason: str = ""
    """A value of `left_out`, `finish_reason` or `end_reason`; `masked`; or `trained`, neither left out nor masked."""
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    step_min: int | None = None
    step_max: int | None = None
    sort: str = "step"
    """One of `SORTS`."""
    descending: bool = True
    page: int = 1
    per_page: int = 50


class Rollouts:
    """The rollouts of a run that count: without those of steps that a later attempt took again. Threads may share it.

    Example: `Rollouts(RunDir("runs/first")).find(Query(text="sorry", sort="reward"))`.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._index = TableIndex(run_dir, "rollouts", COLUMNS, "rollouts")

    def find(self, query: Query) -> Page:
        """One page of the rollouts that a query asks for. Raises ValueError for an order that is not in `SORTS`."""
        if query.sort not in SORTS:
            raise ValueError(f"sort={query.sort!r}: is no order of rollouts; choose one of {', '.join(SORTS)}")
        direction = "desc" if query.descending else "asc"
        order = f"{query.sort} {direction} nulls last, part {direction}, line {direction}"
        with self._index.current():
            conditions, values = _restrictions(query)
            restricted = [*conditions, self._index.counting()], values
            return self._index.page(restricted, order, text=query.text, page=query.page, per_page=query.per_page)

    def siblings(self, group_id: str, step: int | None = None) -> list[dict[str, Any]]:
        """The rollouts of a group, by their ids, with the columns of the index and beginnings of the texts."""
        with self._index.current():
            condition, values = f"group_id = ? and {self._index.counting()}", [group_id]
            if step is not None:
                condition, values = f"{condition} and step = {int(step)}", [group_id]
            rows = self._index.rows(f"select * from records where {condition} order by part, line limit 1000", values)
            self._index.preview(rows)
            return rows

    def groups(self, step: int) -> list[dict[str, Any]]:
        """The groups of a step: `group_id`, `task_id`, `left_out`, `rewards` and `rollout_ids` in one order."""
        with self._index.current():
            return self._index.rows(
                "select group_id, any_value(task_id) as task_id, any_value(left_out) as left_out, list(reward order by "
                "part, line) as rewards, list(rollout_id order by part, line) as rollout_ids from records "
                f"where step = ? and {self._index.counting()} group by group_id order by min(part), min(line) "
                "limit 2000",
                [step],
            )

    def numbers(self, column: str, num_steps: int = 5) -> list[float]:
        """A column of numbers (`reward`, `advantage`, `num_tokens`) of the newest steps' rollouts. Raises ValueError
        for another column."""
        if column not in ("reward", "advantage", "num_tokens"):
            raise ValueError(f"column={column!r}: holds no numbers to count; take reward, advantage or num_tokens")
        with self._index.current():
            newest = (
                f"select distinct step from records where {self._index.counting()} order by step desc limit {num_steps}"
            )
            rows = self._index.rows(
                f"select {column} as x from records where {column} is not null and step in ({newest}) and "
                f"{self._index.counting()} order by part desc, line desc limit {_MOST_COUNTED}"
            )
            return [float(row["x"]) for row in rows]

    def steps(self) -> list[int]:
        """The steps that have rollouts, in order."""
        with self._index.current():
            return [
                r["step"]
                for r in self._index.rows(
                    f"select distinct step from records where {self._index.counting()} order by 1"
                )
            ]

    def reasons(self) -> list[str]:
        """The values of `left_out`, `finish_reason` and `end_reason` that there are, most frequent first."""
        with self._index.current():
            union = " union all ".join(f"select {name} as reason from records" for name in _REASONS)
            return [
                row["reason"]
                for row in self._index.rows(
                    f"select reason from ({union}) where reason <> '' group by reason order by count(*) desc limit 50"
                )
            ]

    def complete(self, rollout_id: str) -> dict[str, Any] | None:
        """The whole record of a rollout, with whatever columns it has; None where there is no such rollout."""
        with self._index.current():
            return self._index.whole(f"rollout_id = ? and {self._index.counting()}", [rollout_id])


def _restrictions(query: Query) -> tuple[list[str], list[Any]]:
    """SQL conditions on the index, and their values."""
    conditions, values = restrictions(
        {
            "reward >= ?": query.reward_min,
            "reward <= ?": query.reward_max,
            "num_tokens >= ?": query.tokens_min,
            "num_tokens <= ?": query.tokens_max,
            "step >= ?": query.step_min,
            "step <= ?": query.step_max,
            "contains(lower(task_id), lower(?))": query.task or None,
            "group_id = ?": query.group or None,
        }
    )
    if query.reason == "trained":
        conditions.append("coalesce(left_out, '') = '' and not coalesce(masked, false)")
    elif query.reason == "masked":
        conditions.append("masked")
    elif query.reason:
        conditions.append("(left_out = ? or finish_reason = ? or end_reason = ?)")
        values += [query.reason] * 3
    return conditions, values

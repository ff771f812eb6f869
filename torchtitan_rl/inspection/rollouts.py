"""Questions about a run's rollouts: lists, filters, text search, one rollout whole, its siblings.

An index in memory holds what lists are filtered and sorted by. Texts are searched where they lie, in Parquet; whatever
is per token is read for one rollout only. The run may be going on: each question sees the complete lines so far.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import duckdb

from torchtitan_rl.inspection.rollout_parts import SCAN, Parts, literal
from torchtitan_rl.observability import attempts
from torchtitan_rl.observability.json_lines import parsed
from torchtitan_rl.observability.run_dir import RunDir

__all__ = ["SORTS", "Found", "Query", "Rollouts"]

SORTS = ("step", "reward", "advantage", "num_tokens", "num_turns", "task_id", "rollout_id")
"""What lists are sorted by."""
_MEMORY = "160MB"
_THREADS = 2
_PREVIEW = 240
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


@dataclass(kw_only=True, slots=True)
class Found:
    """One page of a list: rows with the columns of the index, and beginnings of `prompt` and `text`."""

    rows: list[dict[str, Any]]
    total: int
    """Rollouts on all pages."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, or was left out."""


class Rollouts:
    """The rollouts of a run that count: without those of steps that a later attempt took again. Threads may share it.

    Example: `Rollouts(RunDir("runs/first")).find(Query(text="sorry", sort="reward"))`.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir, self._lock = run_dir, threading.Lock()
        settings: dict[str, Any] = {"memory_limit": _MEMORY, "threads": _THREADS, "autoinstall_known_extensions": False}
        self._connection = duckdb.connect(":memory:", config=settings | {"autoload_known_extensions": False})
        self._parts = Parts(run_dir.path / "rollouts", self._connection)

    def find(self, query: Query) -> Found:
        """One page of the rollouts that a query asks for. Raises ValueError for an order that is not in `SORTS`."""
        if query.sort not in SORTS:
            raise ValueError(f"sort={query.sort!r}: is no order of rollouts; choose one of {', '.join(SORTS)}")
        with self._lock:
            self._parts.refresh(limit_s=0.6)
            conditions, values = _conditions(query)
            conditions += [counting := self._counting()]
            source, found = "rollouts", []
            if query.text:
                source, found = self._containing(query.text)
            direction = "desc" if query.descending else "asc"
            rows = self._rows(
                f"select *, count(*) over () as total from {source} where {' and '.join(conditions)} order by "
                f"{query.sort} {direction} nulls last, part {direction}, line {direction} limit ? offset ?",
                [*found, *values, query.per_page, (max(1, query.page) - 1) * query.per_page],
            )
            total = rows[0].pop("total") if rows else 0
            self._preview(rows)
            return Found(rows=rows, total=total, notes=self._notes(counting))

    def siblings(self, group_id: str, step: int | None = None) -> list[dict[str, Any]]:
        """The rollouts of a group, by their ids, with the columns of the index and beginnings of the texts."""
        with self._lock:
            self._parts.refresh(limit_s=0.6)
            where, values = f"group_id = ? and {self._counting()}", [group_id]
            if step is not None:
                where, values = f"{where} and step = {int(step)}", [group_id]
            rows = self._rows(f"select * from rollouts where {where} order by part, line limit 1000", values)
            self._preview(rows)
            return rows

    def groups(self, step: int) -> list[dict[str, Any]]:
        """The groups of a step: `group_id`, `task_id`, `left_out`, `rewards` and `rollout_ids` in one order."""
        with self._lock:
            self._parts.refresh(limit_s=0.6)
            return self._rows(
                "select group_id, any_value(task_id) as task_id, any_value(left_out) as left_out, list(reward order by "
                "part, line) as rewards, list(rollout_id order by part, line) as rollout_ids from rollouts "
                f"where step = ? and {self._counting()} group by group_id order by min(part), min(line) limit 2000",
                [step],
            )

    def numbers(self, column: str, num_steps: int = 5) -> list[float]:
        """A column of numbers (`reward`, `advantage`, `num_tokens`) of the newest steps' rollouts. Raises ValueError
        for another column."""
        if column not in ("reward", "advantage", "num_tokens"):
            raise ValueError(f"column={column!r}: holds no numbers to count; take reward, advantage or num_tokens")
        with self._lock:
            self._parts.refresh(limit_s=0.6)
            newest = f"select distinct step from rollouts where {self._counting()} order by step desc limit {num_steps}"
            rows = self._rows(
                f"select {column} as x from rollouts where {column} is not null and step in ({newest}) and "
                f"{self._counting()} order by part desc, line desc limit {_MOST_COUNTED}"
            )
            return [float(row["x"]) for row in rows]

    def steps(self) -> list[int]:
        """The steps that have rollouts, in order."""
        with self._lock:
            self._parts.refresh(limit_s=0.6)
            return [
                r["step"] for r in self._rows(f"select distinct step from rollouts where {self._counting()} order by 1")
            ]

    def reasons(self) -> list[str]:
        """The values of `left_out`, `finish_reason` and `end_reason` that there are, most frequent first."""
        with self._lock:
            self._parts.refresh(limit_s=0.6)
            union = " union all ".join(f"select {name} as reason from rollouts" for name in _REASONS)
            return [
                row["reason"]
                for row in self._rows(
                    f"select reason from ({union}) where reason <> '' group by reason order by count(*) desc limit 50"
                )
            ]

    def complete(self, rollout_id: str) -> dict[str, Any] | None:
        """The whole record of a rollout, with whatever columns it has; None where there is no such rollout."""
        with self._lock:
            self._parts.refresh(limit_s=0.6)
            where = f"rollout_id = ? and {self._counting()} order by part desc, line desc limit 1"
            rows = self._rows(f"select part, line, start, size from rollouts where {where}", [rollout_id])
            if not rows:
                return None
            try:
                return self._record(**rows[0])
            except FileNotFoundError:  # the part has become Parquet meanwhile
                self._parts.refresh(limit_s=0.6)
                return self._record(**rows[0])

    def _record(self, part: int, line: int, start: int | None, size: int | None) -> dict[str, Any]:
        if part in self._parts.columnar:
            wanted = f"select * exclude (filename, file_row_number) from {SCAN} where file_row_number = ?"
            return self._rows(wanted, [literal(self._parts.path(part)), line])[0]
        with open(self._parts.path(part), "rb") as stream:
            stream.seek(start)
            return parsed(stream.read(size))

    def _rows(self, sql: str, values: list[Any] | None = None) -> list[dict[str, Any]]:
        answer = self._connection.execute(sql, values or [])
        names = [column[0] for column in answer.description]
        return [dict(zip(names, row)) for row in answer.fetchall()]

    def _counting(self) -> str:
        """A condition that holds for the rollouts that count, see `observability.attempts`."""
        try:
            begun = attempts.begun(self._run_dir)
        except (OSError, ValueError, TypeError, KeyError):  # half-written, or of another version
            return "true"
        limits = {a: min((step for b, step in begun.items() if b > a), default=None) for a in begun}
        wrong = [f"(attempt = {int(a)} and step > {int(step)})" for a, step in limits.items() if step is not None]
        return f"not ({' or '.join(wrong)})" if wrong else "true"

    def _containing(self, text: str) -> tuple[str, list[Any]]:
        """A relation of the rollouts whose prompt or text contains `text`, and the values that it asks for."""
        holds = "(contains(lower(text), lower(?)) or contains(lower(prompt), lower(?)))"
        hits = f"select part, line from texts where {holds}"
        values: list[Any] = [text, text]
        if files := [literal(file) for file in self._parts.columnar.values()]:
            part_of = "TRY_CAST(parse_filename(filename, true) AS INTEGER)"
            hits += f" union all select {part_of} as part, file_row_number as line from {SCAN} where {holds}"
            values += [files, text, text]
        return f"(rollouts semi join ({hits}) using (part, line))", values

    def _preview(self, rows: list[dict[str, Any]]) -> None:
        """Adds the beginnings of `prompt` and `text` to rows."""
        places = [(row["part"], row["line"]) for row in rows]
        for row in rows:
            row["prompt"] = row["text"] = None
        by_part: dict[int, list[int]] = {}
        for part, number in places:
            by_part.setdefault(part, []).append(number)
        texts: dict[tuple[int, int], tuple] = {}
        shown = f"left(prompt, {_PREVIEW}), left(text, {_PREVIEW})"
        for part, numbers in by_part.items():
            if part in self._parts.columnar:
                sql = f"select file_row_number, {shown} from {SCAN}"
                found = self._connection.execute(
                    f"{sql} where file_row_number in (select unnest(?::BIGINT[]))",
                    [literal(self._parts.path(part)), numbers],
                )
            else:
                sql = f"select line, {shown} from texts where part = ? and line in (select unnest(?::BIGINT[]))"
                found = self._connection.execute(sql, [part, numbers])
            texts |= {(part, number): (prompt, text) for number, prompt, text in found.fetchall()}
        for row in rows:
            row["prompt"], row["text"] = texts.get((row["part"], row["line"]), (None, None))

    def _notes(self, counting: str) -> list[str]:
        notes = list(self._parts.notes.values())
        if self._parts.pending_bytes:
            notes.append(f"{self._parts.pending_bytes / 1e6:.0f} MB of rollouts are still being read; look again")
        if counting != "true":
            (left,) = self._rows(f"select count(*) as n from rollouts where not ({counting})")
            if left["n"]:
                notes.append(f"{left['n']} rollouts of steps that a later attempt took again are left out")
        return notes


def _conditions(query: Query) -> tuple[list[str], list[Any]]:
    """SQL conditions on the index, and their values."""
    bounds = {
        "reward >= ?": query.reward_min,
        "reward <= ?": query.reward_max,
        "num_tokens >= ?": query.tokens_min,
        "num_tokens <= ?": query.tokens_max,
        "step >= ?": query.step_min,
        "step <= ?": query.step_max,
        "contains(lower(task_id), lower(?))": query.task or None,
        "group_id = ?": query.group or None,
    }
    conditions = [condition for condition, value in bounds.items() if value is not None]
    values = [value for value in bounds.values() if value is not None]
    if query.reason == "trained":
        conditions.append("coalesce(left_out, '') = '' and not coalesce(masked, false)")
    elif query.reason == "masked":
        conditions.append("masked")
    elif query.reason:
        conditions.append("(left_out = ? or finish_reason = ? or end_reason = ?)")
        values += [query.reason] * 3
    return conditions, values

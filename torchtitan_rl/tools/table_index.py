"""The records of one table of a run, as SQL: what lists are filtered and sorted by is in memory, texts are on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import duckdb

from torchtitan_rl.record import attempts
from torchtitan_rl.record.json_lines import parsed
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.rollout_parts import SCAN, RolloutParts, first_line, literal

__all__ = ["Page", "TableIndex", "restrictions"]

_MEMORY = "160MB"
_THREADS = 2
_PREVIEW = 240
_REFRESH_S = 0.6


@dataclass(kw_only=True, slots=True)
class Page:
    """One page of a list: rows with the columns of the index, and beginnings of `prompt` and `text`."""

    rows: list[dict[str, Any]]
    total: int
    """Records on all pages."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, or was left out."""


def restrictions(bounds: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """SQL conditions, and the values of their question marks. `bounds`: condition -> value; None does not restrict."""
    kept = {condition: value for condition, value in bounds.items() if value is not None}
    return list(kept), list(kept.values())


class TableIndex:
    """The table `records` of DuckDB, with the records of a run's table. Threads take turns with `current`.

    Example::

        index = TableIndex(run_dir, "rollouts", COLUMNS, "rollouts")
        with index.current():
            index.rows("select count(*) as n from records")
    """

    def __init__(self, run_dir: RunDir, table: str, columns: Mapping[str, tuple[str, str]], noun: str) -> None:
        """`columns` are such as `rollout_parts.COLUMNS`; notes call the records by `noun`, a plural."""
        self._run_dir, self._noun, self._lock = run_dir, noun, threading.Lock()
        settings: dict[str, Any] = {"memory_limit": _MEMORY, "threads": _THREADS, "autoinstall_known_extensions": False}
        self._connection = duckdb.connect(":memory:", config=settings | {"autoload_known_extensions": False})
        self._parts = RolloutParts(run_dir.path / table, self._connection, columns)
        self._attempts_note = ""
        """Why the last `counting` leaves no record out; empty: it knows which to leave out."""

    @contextmanager
    def current(self) -> Iterator[None]:
        """Keeps other threads out for the block, before which new records are read, for half a second at most."""
        with self._lock:
            self._refresh()
            yield

    def _refresh(self) -> None:
        self._parts.refresh(limit_s=_REFRESH_S)

    def page(
        self,
        restricted: tuple[list[str], list[Any]],
        order: str,
        *,
        among: str = "records",
        text: str = "",
        page: int,
        per_page: int,
    ) -> Page:
        """A page of the records of the relation `among` that meet all of some `restrictions`, in an order, and whose
        prompt or text contains `text`."""
        conditions, values = restricted
        source, searched = self.containing(text, among) if text else (among, [])
        rows = self.rows(
            f"select *, count(*) over () as total from {source} where {' and '.join(conditions)} "
            f"order by {order} limit ? offset ?",
            [*searched, *values, per_page, (max(1, page) - 1) * per_page],
        )
        if rows or page <= 1:
            total = rows[0]["total"] if rows else 0
        else:  # no row of a page past the last one carries the number
            condition = " and ".join(conditions)
            (count,) = self.rows(f"select count(*) as n from {source} where {condition}", [*searched, *values])
            total = count["n"]
        self.preview(rows)
        return Page(rows=rows, total=total, notes=self.notes())

    def whole(self, where: str, values: list[Any]) -> dict[str, Any] | None:
        """The newest record that a condition holds for, with whatever columns it has on disk; None: there is none."""
        sql = f"select part, line, start, size from records where {where} order by part desc, line desc limit 1"
        rows = self.rows(sql, values)
        if not rows:
            return None
        try:
            return self._record(**rows[0])
        except FileNotFoundError:  # the part has become Parquet meanwhile
            self._refresh()
            return self._record(**rows[0])

    def _record(self, part: int, line: int, start: int | None, size: int | None) -> dict[str, Any]:
        if part in self._parts.columnar:
            wanted = f"select * exclude (filename, file_row_number) from {SCAN} where file_row_number = ?"
            return self.rows(wanted, [literal(self._parts.path(part)), line])[0]
        with open(self._parts.path(part), "rb") as stream:
            stream.seek(start)
            return parsed(stream.read(size))

    def rows(self, sql: str, values: list[Any] | None = None) -> list[dict[str, Any]]:
        """What a statement selects, a dict per row. `values` stand for its question marks."""
        answer = self._connection.execute(sql, values or [])
        names = [column[0] for column in answer.description]
        return [dict(zip(names, row)) for row in answer.fetchall()]

    def counting(self) -> str:
        """A condition that holds for the records that count, see `record.attempts`."""
        self._attempts_note = ""
        try:
            begun = attempts.begun(self._run_dir)
            limits = {a: min((step for b, step in begun.items() if b > a), default=None) for a in begun}
            wrong = [f"(attempt = {int(a)} and step > {int(step)})" for a, step in limits.items() if step is not None]
        except (OSError, ValueError, TypeError, KeyError, RuntimeError) as error:  # damaged, or of another version
            self._attempts_note = (
                f"attempts: cannot be read ({first_line(error)}); {self._noun} of steps that a later attempt took "
                "again are shown too"
            )
            return "true"
        return f"not ({' or '.join(wrong)})" if wrong else "true"

    def containing(self, text: str, among: str = "records") -> tuple[str, list[Any]]:
        """A relation of the records of the relation `among` whose prompt or text contains `text`, and the values that
        it asks for."""
        holds = "(contains(lower(text), lower(?)) or contains(lower(prompt), lower(?)))"
        hits = f"select part, line from texts where {holds}"
        values: list[Any] = [text, text]
        if files := [literal(file) for file in self._parts.columnar.values()]:
            part_of = "TRY_CAST(parse_filename(filename, true) AS INTEGER)"
            hits += f" union all select {part_of} as part, file_row_number as line from {SCAN} where {holds}"
            values += [files, text, text]
        return f"({among} semi join ({hits}) using (part, line))", values

    def preview(self, rows: list[dict[str, Any]], length: int = _PREVIEW) -> None:
        """Adds the first `length` characters of `prompt` and `text` to rows."""
        places = [(row["part"], row["line"]) for row in rows]
        for row in rows:
            row["prompt"] = row["text"] = None
        by_part: dict[int, list[int]] = {}
        for part, number in places:
            by_part.setdefault(part, []).append(number)
        texts: dict[tuple[int, int], tuple] = {}
        shown = f"left(prompt, {int(length)}), left(text, {int(length)})"
        for part, numbers in by_part.items():
            if part in self._parts.columnar:
                sql = f"select file_row_number, {shown} from {SCAN}"
                previews = self._connection.execute(
                    f"{sql} where file_row_number in (select unnest(?::BIGINT[]))",
                    [literal(self._parts.path(part)), numbers],
                )
            else:
                sql = f"select line, {shown} from texts where part = ? and line in (select unnest(?::BIGINT[]))"
                previews = self._connection.execute(sql, [part, numbers])
            texts |= {(part, number): (prompt, text) for number, prompt, text in previews.fetchall()}
        for row in rows:
            row["prompt"], row["text"] = texts.get((row["part"], row["line"]), (None, None))

    def notes(self) -> list[str]:
        """What could not be read, and how many records do not count."""
        counting = self.counting()
        notes = [*self._parts.notes.values(), *([self._attempts_note] if self._attempts_note else [])]
        if self._parts.pending_bytes:
            notes.append(f"{self._parts.pending_bytes / 1e6:.0f} MB of {self._noun} are still being read; look again")
        if counting != "true":
            (left,) = self.rows(f"select count(*) as n from records where not ({counting})")
            if left["n"]:
                notes.append(f"{left['n']} {self._noun} of steps that a later attempt took again are left out")
        return notes

"""The parts of a run's table of texts, read into an index for queries: everything but text and what is per token."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan_rl.record.json_lines import parsed

__all__ = ["COLUMNS", "EVALUATION_COLUMNS", "SCAN", "RolloutParts", "first_line", "literal"]

SCAN = "read_parquet(?, filename=true, file_row_number=true, union_by_name=true, hive_partitioning=false)"
"""Parquet files as rows, each with its file and its number there; directories named `a=b` are no columns."""

COLUMNS = {
    "step": ("INTEGER", "step"),
    "attempt": ("INTEGER", "attempt"),
    "rollout_id": ("VARCHAR", "rollout_id"),
    "group_id": ("VARCHAR", "group_id"),
    "task_id": ("VARCHAR", "task_id"),
    "role": ("VARCHAR", "role"),
    "reward": ("DOUBLE", "reward"),
    "advantage": ("DOUBLE", "advantage"),
    "left_out": ("VARCHAR", "left_out"),
    "masked": ("BOOLEAN", "masked"),
    "num_tokens": ("INTEGER", "list_sum(num_tokens)"),
    "num_turns": ("INTEGER", "len(num_tokens)"),
    "finish_reason": ("VARCHAR", "finish_reason"),
    "end_reason": ("VARCHAR", "end_reason"),
    "policy_version_min": ("INTEGER", "policy_version_min"),
    "policy_version_max": ("INTEGER", "policy_version_max"),
}
"""Column of the index of rollouts -> its type, and what it is in terms of the table's columns."""
EVALUATION_COLUMNS = {
    "step": ("INTEGER", "step"),
    "attempt": ("INTEGER", "attempt"),
    "name": ("VARCHAR", "name"),
    "split": ("VARCHAR", "split"),
    "task_index": ("INTEGER", "task_index"),
    "task_id": ("VARCHAR", "task_id"),
    "sample": ("INTEGER", "sample"),
    "reward": ("DOUBLE", "reward"),
    "correct": ("BOOLEAN", "correct"),
    "failed": ("VARCHAR", "failed"),
    "num_tokens": ("INTEGER", "list_sum(num_tokens)"),
    "finish_reason": ("VARCHAR", "finish_reason"),
    "end_reason": ("VARCHAR", "end_reason"),
}
"""The same of the index of completions of evaluations."""
_TURNS = re.compile(rb', ?"turns": ?')  # in a text the quotes would be escaped; earlier runs have spaces
_BEFORE_TURNS = {"step", "attempt", "rollout_id", "group_id", "task_id", "text", "reward", "advantage", "num_tokens"}
_LINES_AT_ONCE = 500


class RolloutParts:
    """Reads new records of `directory`, a table of a run, into two tables of a DuckDB connection.

    `records` has `columns`, and where a record lies: `part`, `line`, and for JSON lines `start` and `size` in bytes.
    `texts` has `part`, `line`, `prompt` and `text` of JSON lines. A record keeps its line when its part becomes
    Parquet.
    """

    def __init__(
        self, directory: Path, connection: duckdb.DuckDBPyConnection, columns: Mapping[str, tuple[str, str]]
    ) -> None:
        """`columns` are such as `COLUMNS`."""
        self.directory, self._connection, self._columns = directory, connection, columns
        self._types = {name: _TYPES[kind] for name, (kind, _) in columns.items()} | _PLACE_TYPES
        self.notes: dict[str, str] = {}
        """File -> what is wrong with it."""
        self.columnar: dict[int, Path] = {}
        """Part -> its Parquet file, for the parts that have one."""
        self.pending_bytes = 0
        """Bytes of JSON lines that the last `refresh` had no time for."""
        self._rows: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._failed: dict[str, int] = {}
        """File that could not be read -> its time of change then."""
        declared = ", ".join(f"{name} {kind}" for name, (kind, _) in columns.items())
        connection.execute(f"create table records (part INTEGER, line INTEGER, start BIGINT, size BIGINT, {declared})")
        connection.execute("create table texts (part INTEGER, line INTEGER, prompt VARCHAR, text VARCHAR)")

    def refresh(self, limit_s: float) -> None:
        """Reads what was written since the last call; stops after about `limit_s` seconds."""
        until, self.pending_bytes = time.monotonic() + limit_s, 0
        files = sorted(self.directory.iterdir()) if self.directory.is_dir() else []
        parts = {int(f.stem): f for f in files if f.suffix == ".jsonl" and f.stem.isdecimal()}
        sealed = {int(f.stem): f for f in files if f.suffix == ".parquet" and f.stem.isdecimal()}
        self._seal({part: file for part, file in sealed.items() if part not in self.columnar})
        for part, file in parts.items():
            if part not in self.columnar:
                self._noted(file, self._read_lines, part, until)

    def path(self, part: int) -> Path:
        """The file that a part is in now."""
        return self.columnar.get(part, self.directory / f"{part:06d}.jsonl")

    def _noted(self, file: Path, read: Any, *arguments: Any) -> bool:
        """Whether `read` succeeded; a failure is noted, and tried again when the file changes."""
        changed = 0
        try:
            changed = file.stat().st_mtime_ns
            if self._failed.get(file.name) == changed:
                return False
            read(file, *arguments)
        except FileNotFoundError:  # sealed meanwhile: the next refresh finds the Parquet file
            return False
        except (OSError, duckdb.Error, pa.ArrowException) as error:
            self._failed[file.name] = changed
            self.notes[file.name] = f"{self.directory.name}/{file.name}: cannot be read ({first_line(error)})"
            return False
        if file.name in self._failed:
            del self._failed[file.name], self.notes[file.name]
        return True

    def _seal(self, files: dict[int, Path]) -> None:
        """Reads parts that are Parquet: those that nothing is known of together, which is quicker; the others, and all
        if one of them cannot be read, one by one."""
        fresh = {part: file for part, file in files.items() if part not in self._rows and file.name not in self.notes}
        self._connection.begin()
        try:
            self._read_columnar(fresh)
            self._connection.commit()
            self.columnar |= fresh
        except (OSError, duckdb.Error, pa.ArrowException):
            self._connection.rollback()
            fresh = {}
        for part, file in files.items():
            if part not in fresh and self._noted(file, lambda file, part: self._read_columnar({part: file}), part):
                self.columnar[part] = file

    def _read_columnar(self, files: dict[int, Path]) -> None:
        alike: dict[tuple[str, ...], list[int]] = {}
        for part, file in files.items():
            alike.setdefault(tuple(pq.read_schema(file).names), []).append(part)
        for have, parts in alike.items():
            wanted = ", ".join(
                f"TRY_CAST({source if _COUNTED.get(name, name) in have else 'NULL'} AS {kind})"
                for name, (kind, source) in self._columns.items()
            )
            part_of = "CAST(parse_filename(filename, true) AS INTEGER)"
            self._connection.execute(
                f"insert into records select {part_of}, file_row_number, NULL, NULL, {wanted} from {SCAN} "
                "where file_row_number >= ?",
                [[literal(files[part]) for part in parts], self._rows.get(parts[0], 0) if len(parts) == 1 else 0],
            )
            self._connection.execute("delete from texts where part in (select unnest(?::INTEGER[]))", [parts])

    def _read_lines(self, file: Path, part: int, until: float) -> None:
        with open(file, "rb") as stream:
            stream.seek(self._offsets.get(part, 0))
            while chunk := list(_complete(stream)):
                self._add(file.name, part, chunk)
                if time.monotonic() > until:
                    self.pending_bytes += file.stat().st_size - self._offsets[part]
                    return

    def _add(self, name: str, part: int, lines: list[bytes]) -> None:
        records: list[tuple] = []
        texts: list[tuple] = []
        for line in lines:
            at, row = self._offsets.get(part, 0), self._rows.get(part, 0)
            self._offsets[part] = at + len(line)
            try:
                record = _head(line)
                values = _light(record, self._columns)
            except (ValueError, TypeError, AttributeError):
                self.notes[name] = f"{self.directory.name}/{name}: a line is no JSON"
                continue
            self._rows[part] = row + 1
            records.append((part, row, at, len(line), *values))
            texts.append((part, row, _text(record.get("prompt")), _text(record.get("text"))))
        self._insert("records", ("part", "line", "start", "size", *self._columns), records)
        self._insert("texts", ("part", "line", "prompt", "text"), texts)

    def _insert(self, table: str, names: tuple[str, ...], rows: list[tuple]) -> None:
        if rows:
            columns = {name: pa.array(column, self._types[name]) for name, column in zip(names, zip(*rows))}
            self._connection.register("fresh", pa.table(columns))
            self._connection.execute(f"insert into {table} select * from fresh")
            self._connection.unregister("fresh")


_TYPES = {"INTEGER": pa.int32(), "VARCHAR": pa.string(), "DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}
_PLACE_TYPES = {"part": pa.int32(), "line": pa.int32(), "start": pa.int64(), "size": pa.int64()}
_PLACE_TYPES |= {"prompt": pa.string(), "text": pa.string()}
_COUNTED = {"num_turns": "num_tokens"}
"""Column of an index -> the column of the table that it is counted from, where the names differ."""


def literal(file: Path) -> str:
    """A path that DuckDB does not take for a pattern."""
    return re.sub(r"[*?\[]", r"[\g<0>]", str(file))


def _complete(stream: Any) -> Iterator[bytes]:
    """The next complete lines; a line without an end is being written, or was cut off by a crash."""
    for _ in range(_LINES_AT_ONCE):
        line = stream.readline()
        if not line.endswith(b"\n"):
            return
        yield line


def _head(line: bytes) -> dict[str, Any]:
    """A record as far as its turns, which are long and come last; whole where that is not so."""
    if turns := _TURNS.search(line):
        try:
            if (record := parsed(line[: turns.start()] + b"}")).keys() >= _BEFORE_TURNS:
                return record
        except ValueError:
            pass
    return parsed(line)


def _light(record: dict[str, Any], columns: Mapping[str, tuple[str, str]]) -> tuple:
    """The values of `columns`; None where a record of another version has something else."""
    counts = record.get("num_tokens")
    counts = counts if isinstance(counts, list) and all(isinstance(n, int) for n in counts) else None
    counts_of_turns = {
        "num_tokens": None if counts is None else sum(counts),
        "num_turns": None if counts is None else len(counts),
    }
    return tuple(
        _as(kind, counts_of_turns[name] if name in counts_of_turns else record.get(name))
        for name, (kind, _) in columns.items()
    )


def _as(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "VARCHAR":
        return _text(value)
    try:
        return {"INTEGER": int, "DOUBLE": float, "BOOLEAN": bool}[kind](value)
    except (TypeError, ValueError, OverflowError):
        return None


def _text(value: Any) -> str | None:
    """Text without the lone surrogates that Parquet and DuckDB cannot hold."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else None


def first_line(error: Exception) -> str:
    """The first line of an error's text, 200 characters at most."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]

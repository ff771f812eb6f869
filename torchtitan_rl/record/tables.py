"""Tables of records that grow while a run goes on: JSON lines first, Parquet from the next checkpoint on.

A table is a directory of numbered parts. Records are appended to the newest part, a file of JSON lines that any program
can follow. `Table.rotate` begins a new part, `Table.seal` turns the older ones into Parquet::

    rollouts/000001.parquet
    rollouts/000002.parquet
    rollouts/000003.jsonl      the part that grows

A part never changes its number, and counts once however a crash falls: where a Parquet file exists, the JSON lines of
the same number are a left-over. A crash may cut the last line of a part; the next process begins a part of its own, and
readers leave the cut line out.
"""

from __future__ import annotations

import glob
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from torchtitan_rl.record.checksums import Checksums
from torchtitan_rl.record.json_lines import append_lines, json_line, parsed

__all__ = ["ROW_GROUP", "Table"]

ROW_GROUP = 1000
"""Records of a Parquet file that are compressed together: a reader of one rollout reads this many."""


class Table:
    """The records in `directory`, each a dict with the columns of `schema`. A column may be missing in a record: None
    is read for it.

    Example: `Table(Path("run/ledger"), pa.schema({"step": pa.int32()})).append([{"step": 3}])`.
    """

    def __init__(self, directory: Path, schema: pa.Schema) -> None:
        self.directory, self.schema, self._columns = directory, schema, dict.fromkeys(schema.names)
        self._number = 0
        """The part that this process appends to; 0 before its first record."""
        self._lock = threading.Lock()
        """Some tables get their records from another thread than the one that begins new parts."""

    def append(self, records: Iterable[dict[str, Any]], *, durable: bool = False) -> None:
        """Adds records: all, or none if one is refused. On return the operating system has them, and with `durable` the
        disk. Raises ValueError for a column that the schema lacks."""
        lines = []
        for record in records:
            if unknown := sorted(record.keys() - self._columns.keys()):
                raise ValueError(
                    f"table={self.directory.name}: has no column {', '.join(unknown)}; its columns are "
                    f"{', '.join(self._columns)}"
                )
            lines.append(json_line(record))
        with self._lock:
            self._number = self._number or self._begin()
            append_lines(self._lines(self._number), b"".join(lines), durable=durable)

    def rotate(self) -> None:
        """Lets the next record begin a new part."""
        with self._lock:
            if self._number and self._lines(self._number).exists():
                self._number += 1

    def seal(self, checksums: Checksums | None = None) -> None:
        """Turns the parts before the newest one into Parquet, which `checksums` notes. May run in a thread while
        records are appended."""
        for number in self._parts():
            if number != self._number and (lines := self._lines(number)).exists():
                columnar, beside = self._columnar(number), self._columnar(number).with_suffix(".writing")
                if checksums is not None:
                    checksums.note(lines)  # a damage is told of before it becomes Parquet
                if not columnar.exists():
                    table = self._columns_of(lines)
                    pq.write_table(table, beside, compression="zstd", row_group_size=ROW_GROUP)
                    with open(beside, "rb") as file:
                        os.fsync(file.fileno())
                    beside.rename(columnar)
                if checksums is not None:
                    checksums.note(columnar)
                lines.unlink()

    def read(self, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Every complete record, in the order of writing; also while another process appends and seals. `columns` are
        those to read; None: all."""
        for number in sorted(self._parts()):
            try:
                if not self._columnar(number).exists():
                    for record in list(self._read_lines(self._lines(number))):
                        yield record if columns is None else {name: record[name] for name in columns}
                    continue
            except FileNotFoundError:  # sealed meanwhile
                pass
            part = pq.read_table(self._columnar(number), schema=self.schema, columns=columns and list(columns))
            yield from part.to_pylist(maps_as_pydicts="strict")

    def files(self) -> list[Path]:
        """The file of each part, in order."""
        parts = ((self._columnar(number), self._lines(number)) for number in sorted(self._parts()))
        return [columnar if columnar.exists() else lines for columnar, lines in parts]

    def __bool__(self) -> bool:
        """Whether anything was ever written."""
        return bool(self._parts())

    def _lines(self, number: int) -> Path:
        return self.directory / f"{number:06d}.jsonl"

    def _parts(self) -> set[int]:
        files = self.directory.iterdir() if self.directory.exists() else ()
        return {int(file.stem) for file in files if file.suffix in (".jsonl", ".parquet") and file.stem.isdecimal()}

    def _begin(self) -> int:
        """Makes the directory; the number of this process's first part."""
        self.directory.mkdir(parents=True, exist_ok=True)
        return max(self._parts(), default=0) + 1

    def _columnar(self, number: int) -> Path:
        return self.directory / f"{number:06d}.parquet"

    def _columns_of(self, lines: Path) -> pa.Table:
        """The records of a part of JSON lines, by DuckDB in a tenth of the time that Python takes. DuckDB reads neither
        a lone surrogate nor a line that was cut; Python does."""
        import duckdb  # not before the first checkpoint: it takes a while

        with duckdb.connect(config={"threads": 1}) as connection:
            empty = connection.from_arrow(self.schema.empty_table())
            kinds = {name: str(kind) for name, kind in zip(empty.columns, empty.types, strict=True)}
            try:
                read = connection.read_json(
                    glob.escape(str(lines)), format="newline_delimited", columns=kinds, hive_partitioning=False
                )
                return read.to_arrow_table().cast(self.schema)
            except duckdb.Error:
                records = list(self._read_lines(lines))
        try:
            return pa.Table.from_pylist(records, schema=self.schema)
        except pa.ArrowException as error:
            raise RuntimeError(f"{lines}: does not fit the columns of the table ({error}); mend its lines") from error

    def _read_lines(self, file: Path) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], 1):
            try:
                record = parsed(line)
            except ValueError as error:
                raise RuntimeError(f"{file}, line {number}: is not JSON ({error}); remove that line") from error
            values = {}
            for field in self.schema:
                try:
                    values[field.name] = _decode(record.get(field.name), field.type)
                except (TypeError, ValueError, AttributeError) as error:
                    raise RuntimeError(
                        f"{file}, line {number}, column {field.name}: is no {field.type} ({error}); remove that line"
                    ) from error
            yield values


def _decode(value: Any, kind: pa.DataType) -> Any:
    """The value that `encode` was given, by the type of its column, with None for the fields that it lacks."""
    if value is None:
        return None
    if pa.types.is_floating(kind):
        return float(value)
    if pa.types.is_string(kind):  # Parquet holds UTF-8, which has no lone surrogate
        return value.encode("utf-8", "replace").decode("utf-8")
    if pa.types.is_list(kind):
        return [_decode(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: _decode(value.get(field.name), field.type) for field in kind}
    if pa.types.is_map(kind):
        return {key: _decode(item, kind.item_type) for key, item in value.items()}
    return value

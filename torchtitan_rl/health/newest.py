"""The newest rollouts of a run, without reading what is long or old."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from torchtitan_rl.record.json_lines import parsed
from torchtitan_rl.record.run_dir import RunDir

__all__ = ["COLUMNS", "newest_rollouts"]

COLUMNS = ("step", "attempt", "group_id", "task_id", "text", "answer", "reward", "reward_parts")
_BATCHES, _MOST = 5, 2000
_TAIL_BYTES = 16 * 2**20


def newest_rollouts(directory: RunDir, columns: Sequence[str] = COLUMNS) -> list[dict[str, Any]]:
    """The rollouts of the last 5 batches of the newest attempt that has any, at most 2,000, oldest first, with some
    columns, which include `step` and `attempt`. Of a part of JSON lines the last 16 MiB are read, of a Parquet file the
    row groups that are needed."""
    rollouts: list[dict[str, Any]] = []
    folder = directory.path / "rollouts"
    parts = {}  # number -> file; where both forms exist, Parquet counts
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        if file.suffix in (".jsonl", ".parquet") and file.stem.isdecimal():
            parts[int(file.stem)] = file
    for _, file in sorted(parts.items(), reverse=True):
        records, is_whole = (_columnar if file.suffix == ".parquet" else _tail)(file, columns)
        rollouts = [*records, *rollouts]
        # What was not read of a part is newer than all of the parts before.
        if not is_whole or len(rollouts) >= _MOST or len({record["step"] for record in rollouts}) > _BATCHES:
            break
    newest = max((record["attempt"] for record in rollouts), default=0)
    rollouts = [record for record in rollouts if record["attempt"] == newest]
    steps = sorted({record["step"] for record in rollouts})[-_BATCHES:]
    return [record for record in rollouts if record["step"] in steps][-_MOST:]


def _tail(file: Path, columns: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    """The last records of a part, and whether these are all of it."""
    try:
        with open(file, "rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - _TAIL_BYTES))
            lines = stream.read().split(b"\n")[:-1]
    except FileNotFoundError:  # sealed meanwhile: the next look finds the Parquet file
        return [], True
    records, is_whole = [], size <= _TAIL_BYTES
    for line in lines if is_whole else lines[1:]:
        try:
            record = parsed(line)
            records.append({name: record.get(name) for name in columns})
        except ValueError:
            continue
    return records, is_whole


def _columnar(file: Path, columns: Sequence[str]) -> tuple[list[dict[str, Any]], bool]:
    """As `_tail`."""
    parquet = pq.ParquetFile(file)
    present = [name for name in columns if name in parquet.schema_arrow.names]
    records: list[dict[str, Any]] = []
    for group in reversed(range(parquet.num_row_groups)):
        table = parquet.read_row_group(group, columns=present)
        rows = table.slice(max(0, table.num_rows - _MOST)).to_pylist(maps_as_pydicts="lossy")
        records = [*({name: row.get(name) for name in columns} for row in rows), *records]
        if len(records) >= _MOST:
            return records, False
    return records, True

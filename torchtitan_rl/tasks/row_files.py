"""Tables of rows that users have: JSONL, Parquet and CSV files, or objects of the `datasets` package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torchtitan_rl.record.json_lines import parsed

__all__ = ["KINDS", "InMemory", "check_column", "has_column", "near", "one_line", "read_file", "value_at"]

KINDS = (".jsonl", ".json", ".parquet", ".csv")
"""Endings of the files that `read_file` reads."""


class InMemory:
    """A `datasets.Dataset` or `DatasetDict` as a config's value: shown in one line, by its rows and columns."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __repr__(self) -> str:
        if not isinstance(self.data, Mapping):
            return _described(self.data)
        return f"{type(self.data).__name__}({'; '.join(f'{k}: {_described(v)}' for k, v in self.data.items())})"


def read_file(path: str, field: str) -> Any:
    """The rows of a file as a `datasets.Dataset`; `field` is the setting that named the file. Values of a CSV file are
    the text that the file has. Raises ValueError for a file that is missing, empty, broken or of another kind."""
    ending, kinds = Path(path).suffix.lower(), f"{', '.join(KINDS[:-1])} or {KINDS[-1]}"
    if not Path(path).is_file():
        file_names = sorted(p.name for p in Path(path).parent.glob("*") if p.suffix.lower() in KINDS)
        raise ValueError(
            f"{field}={path!r}: there is no such file; name a {kinds} file{near(Path(path).name, file_names)}"
        )
    if ending not in KINDS:
        raise ValueError(f"{field}={path!r}: is of a kind that cannot be read; name a {kinds} file")
    if Path(path).stat().st_size == 0:
        raise ValueError(f"{field}={path!r}: is empty; give a file with rows")
    try:
        rows = _read(path, ending)
    except Exception as error:
        # datasets wraps what it could not parse in errors of many kinds, whose cause says more than they do.
        reason = (_broken_line(path) if ending == ".jsonl" else "") or one_line(error.__cause__ or error)
        wanted = {".parquet": "parquet", ".csv": "a header and rows of as many fields"}
        wanted_here = wanted.get(ending, "one JSON object a line, with values of one type in each column")
        raise ValueError(f"{field}={path!r}: cannot be read ({reason}); give {wanted_here}") from error
    if len(rows) == 0:
        raise ValueError(f"{field}={path!r}: has no rows; give a file with rows")
    return rows


def check_column(features: Mapping[str, Any], column: str, field: str, table: str) -> None:
    """Raises ValueError, with the near names, unless rows of these features have `column`, a name or the dotted path of
    a value inside a column."""
    known: Any = features
    for part in [column] if column in features else column.split("."):
        if not isinstance(known, Mapping):
            return  # whether each row has the value is seen when the row is read
        if part not in known:
            has = f"{table}, which has {', '.join(known)}"
            raise ValueError(f"{field}={column!r}: is no column of {has}; name one{near(part, known)}")
        known = known[part]


def has_column(features: Mapping[str, Any], column: str) -> bool:
    """Whether rows of these features have `column`, as `check_column` sees it."""
    try:
        check_column(features, column, "", "")
    except ValueError:
        return False
    return True


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """A row's value in a column, or at a dotted path inside it; None where the row has none."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'question' or 'questions'?`, or nothing where no known name is near."""
    matches = difflib.get_close_matches(name, list(known), 3)
    return f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""


def one_line(error: BaseException) -> str:
    """An error's type and message in at most 200 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else text[:197] + "..."


def _read(path: str, ending: str) -> Any:
    import datasets  # slow to import

    if ending == ".parquet":
        return datasets.Dataset.from_parquet(path)
    if ending == ".csv":
        import pandas

        # datasets would make 7 of the text 007, and nothing of the text NA.
        frame = pandas.read_csv(path, dtype=str, keep_default_na=False)
        if not isinstance(frame.index, pandas.RangeIndex):
            raise ValueError("rows have more fields than the header")
        return datasets.Dataset.from_pandas(frame)
    # on_mixed_types: by default datasets 4.7 raises KeyError where a row lacks a key that the first row has.
    rows = datasets.Dataset.from_json(path, on_mixed_types=None)
    if "Value('timestamp[" not in repr(rows.features):
        return rows
    # Arrow took texts such as 2024-01-05 for times: an answer would no longer be the text that the file has.
    items = _json_items(Path(path).read_text(encoding="utf-8-sig"))
    return datasets.Dataset.from_dict({column: [item.get(column) for item in items] for column in rows.features})


def _json_items(text: str) -> list[dict[str, Any]]:
    """The objects of a file of JSON that `datasets` has read: a list of them, or one a line."""
    if text.lstrip().startswith("["):
        return parsed(text)
    return [parsed(line) for line in text.split("\n") if line.strip()]


def _broken_line(path: str) -> str:
    """What is wrong with the first line that is no JSON object; nothing where every line is one."""
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if line.strip() and not isinstance(parsed(line), dict):
                    return f"line {number} is no JSON object"
            except ValueError as error:
                return f"line {number} is no JSON: {error}"
    return ""


def _described(rows: Any) -> str:
    size = f"{rows.num_rows} rows" if hasattr(rows, "num_rows") else "a stream"
    return f"{type(rows).__name__}({size} of {', '.join(getattr(rows, 'column_names', None) or ['?'])})"

"""Lines of JSON: writing any value as one, and reading one that anybody may have written."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

__all__ = ["append_lines", "append_to", "encode", "json_line", "parsed", "replace_text"]


def append_lines(file: Path, lines: bytes, *, durable: bool = False) -> None:
    """Adds whole lines to a file. On return the operating system has them, and with `durable` the disk. Raises OSError,
    and leaves nothing of them, where there is no room: half of a line would spoil the next one too."""
    with file.open("ab", buffering=0) as stream:
        append_to(stream, lines, durable=durable)


def append_to(stream: io.FileIO, lines: bytes, *, durable: bool = False) -> None:
    """`append_lines` to an open file without a buffer."""
    size, unwritten = stream.seek(0, os.SEEK_END), memoryview(lines)
    try:
        while unwritten:  # a nearly full disk takes a part first
            unwritten = unwritten[stream.write(unwritten) :]
        if durable:
            os.fsync(stream.fileno())
    except OSError:
        stream.truncate(size)
        raise


def replace_text(file: Path, text: str) -> None:
    """Writes a file anew, beside it first: after a kill, a power cut or an OSError it has the text before or this
    one, whole."""
    beside = file.with_name(f"{file.name}.new")
    with beside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(beside, file)


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for whatever is none, also for one that is nested thousands deep,
    where `json.loads` raises RecursionError, which no reader of files expects."""
    try:
        return json.loads(text)
    except RecursionError:
        whole = text.decode(errors="replace") if isinstance(text, bytes) else text
        raise json.JSONDecodeError("Nested too deeply", whole, 0) from None


def json_line(record: Mapping[str, Any]) -> bytes:
    try:  # in a fifth of the time that json takes
        return to_json(record, inf_nan_mode="strings") + b"\n"
    except PydanticSerializationError:  # what no JSON holds, or a lone surrogate: UTF-8 lacks it, JSON has an escape
        return (json.dumps(encode(record), ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def encode(value: Any) -> Any:
    """A value as JSON has it: NaN and the infinities become text that `float()` parses."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value

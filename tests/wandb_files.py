"""What W&B's offline files hold: framed as LevelDB's log, filled with W&B's own messages."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK, _HEADER, _FILE_HEADER = 32768, 7, 7
_FULL, _LAST = 1, 4


def records(file: Path) -> Iterator:
    """The messages (`wandb_internal_pb2.Record`) of a `run-ID.wandb`, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, message = file.read_bytes(), _FILE_HEADER, b""
    assert content[:4] == b":W&B"
    while at + _HEADER <= len(content):
        if _BLOCK - at % _BLOCK < _HEADER:  # no room for a header: the rest of the block is filler
            at += _BLOCK - at % _BLOCK
            continue
        _checksum, length, kind = struct.unpack("<IHB", content[at : at + _HEADER])
        message += content[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(message)
            yield record
            message = b""


def history(file: Path) -> list[dict]:
    """The logged rows, without what W&B adds."""
    rows = []
    for record in records(file):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows

"""How large a request may be, before anything of it is widened: bytes after decompression, parts of a message, numbers
of its dense tensors, and of its answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import zstandard
from tinker.proto import tinker_public_pb2 as pb

from torchtitan_rl.serve.tinker.faults import Fault, user

__all__ = [
    "MAX_ENTRIES",
    "MAX_JSON_VALUES",
    "MAX_PARTS",
    "MAX_TOP_LOGPROBS",
    "beginning",
    "check_entries",
    "check_json",
    "check_parts",
    "decompressed",
    "model_and_number",
]

MAX_PARTS = 2**18
"""Fields of one protobuf message with all messages inside of it, and numbers of its packed shapes: an empty message is
2 bytes on the wire and some 100 in memory."""
MAX_JSON_VALUES = 2**21
"""Values of one JSON body: a number is 2 bytes on the wire and some 60 in memory."""
MAX_ENTRIES = 2**23
"""Numbers of all dense tensors of one request; with targets and weights 96 MiB."""
MAX_TOP_LOGPROBS = 2**21
"""Likeliest tokens of all positions of a prompt, or of a sample with its prompt: each is an object of some 200 bytes in
a generator."""

_UNLOOKED_BYTES = 2**16
"""A message of so few bytes is parsed without being walked through first."""
_CHUNK = 2**20
_HEAD = 64  # fields of a message within which its model and number are looked for

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protobuf


def decompressed(body: bytes, encoding: str | None, max_bytes: int) -> bytes:
    """A body as it was before its `Content-Encoding`, at most `max_bytes`. Raises Fault for what is damaged, too long
    or unknown."""
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise user(f"Content-Encoding={encoding[:40]!r}: is not known; use zstd, or none", status=415)
    parts, size = [], 0
    try:
        if zstandard.frame_content_size(body) > max_bytes:  # -1 where the frame does not say
            raise _too_long(max_bytes)
        reader = zstandard.ZstdDecompressor(max_window_size=max(max_bytes, 2**10)).stream_reader(body)
        while part := reader.read(_CHUNK):
            parts.append(part)
            if (size := size + len(part)) > max_bytes:
                raise _too_long(max_bytes)
    except zstandard.ZstdError as error:
        raise user(f"body: is not what zstd writes in windows of {max_bytes} bytes ({error}); send it again") from error
    return b"".join(parts)


def _too_long(max_bytes: int) -> Fault:
    return user(f"body: is longer than {max_bytes} bytes without zstd; send fewer datums", status=413)


def check_json(body: bytes) -> None:
    """Raises Fault (413) for JSON with more than `MAX_JSON_VALUES` values. Commas and brackets inside of texts count
    too."""
    if len(body) > MAX_JSON_VALUES and sum(body.count(sign) for sign in (b",", b"[", b"{")) > MAX_JSON_VALUES:
        raise user(f"body: has more than {MAX_JSON_VALUES} values in JSON; send fewer datums, or protobuf", status=413)


def check_parts(body: bytes) -> None:
    """Raises Fault (413) for a ForwardBackwardRequest of more than `MAX_PARTS` parts, and Fault for bytes that are no
    protobuf."""
    if len(body) > _UNLOOKED_BYTES:
        _walked(memoryview(body), _nested(pb.ForwardBackwardRequest.DESCRIPTOR), 0)


def check_entries(data: Iterable[list[list[int]]]) -> None:
    """Raises Fault for tensors that have more than `MAX_ENTRIES` numbers when they are dense. `data`: per datum the
    shapes of its tensors. Every tensor counts with the columns of the widest one: the trainer packs datums of one
    width."""
    rows, columns = 0, 1
    for shapes in data:
        for shape in shapes:
            rows += max(0, shape[0]) if shape else 1
            columns = max(columns, *shape[1:], 1)
    if rows * columns > MAX_ENTRIES:
        raise user(
            f"data: its tensors have {rows} rows, and the widest has {columns} columns: {rows * columns} numbers when "
            f"all are dense and as wide; a request may have {MAX_ENTRIES}; send fewer datums, or fewer targets a token"
        )


def beginning(body: bytes, encoding: str | None) -> bytes:
    """What a body begins with, before its `Content-Encoding`; empty where it is damaged."""
    if encoding != "zstd":
        return body
    try:
        return zstandard.ZstdDecompressor(max_window_size=_CHUNK * 64).stream_reader(body).read(_UNLOOKED_BYTES)
    except zstandard.ZstdError:
        return b""


def model_and_number(body: bytes) -> tuple[str, int] | None:
    """`model_id` and `seq_id` of a ForwardBackwardRequest, or of its beginning; None where they cannot be told."""
    model_id, seq_id = "", 0
    try:
        for number, value in islice(_fields(memoryview(body)), _HEAD):
            if number == pb.ForwardBackwardRequest.MODEL_ID_FIELD_NUMBER and isinstance(value, memoryview):
                model_id = bytes(value[:513]).decode()
            elif number == pb.ForwardBackwardRequest.SEQ_ID_FIELD_NUMBER and isinstance(value, int):
                seq_id = value
    except ValueError:
        pass  # cut off or damaged behind what was read
    return (model_id, seq_id) if 0 < len(model_id) <= 512 and 0 < seq_id < 2**31 else None


_Nested = dict[int, "_Nested | None"]
"""By the number of a field that holds messages: the same of those messages; None: packed numbers."""


def _nested(descriptor: Any) -> _Nested:
    messages = {field.number: _nested(field.message_type) for field in descriptor.fields if field.message_type}
    packed = {f.number: None for f in descriptor.fields if f.is_repeated and not f.message_type}
    return messages | packed


def _walked(message: memoryview, nested: _Nested, parts: int) -> int:
    """`parts` and the parts of a message."""
    try:
        for number, value in _fields(message):
            parts += 1
            if number in nested and isinstance(value, memoryview):
                below = nested[number]
                parts = parts + len(value) if below is None else _walked(value, below, parts)
            if parts > MAX_PARTS:
                raise user(f"body: has more than {MAX_PARTS} parts; send fewer datums", status=413)
    except ValueError as error:
        raise user(f"body: is not a ForwardBackwardRequest in protobuf ({error}); send it again") from error
    return parts


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Number and content of each field: bytes, or an integer. Raises ValueError for what is no message."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        kind, content = tag & 7, 0
        if kind == _BYTES:
            size, at = _varint(message, at)
            if size > end - at:
                raise ValueError("a field is longer than the message")
            yield tag >> 3, message[at : at + size]
            at += size
            continue
        if kind == _VARINT:
            content, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"a field has wire type {kind}")
        yield tag >> 3, content
    if at > end:
        raise ValueError("it ends within a field")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number of 7 bits a byte, low ones first, and where it ends."""
    value = shift = 0
    for index in range(at, min(at + 10, len(message))):
        byte = message[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index + 1
        shift += 7
    raise ValueError("a number has no end")

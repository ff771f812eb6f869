"""Checksums of a run's files, so that a damaged one is named: `checksums.jsonl` in the run's directory.

A line has `file` (below the run's directory), `bytes` and `xxh3` of so many bytes at the file's beginning: a file of
JSON lines may have grown since. The last line of a file counts. Lines are written at each checkpoint, at the beginning
and at the end of each attempt.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import xxhash

from torchtitan_rl.record.json_lines import append_lines, json_line, parsed

__all__ = ["Checksums"]

logger = logging.getLogger(__name__)

_CHUNK = 2**20
_NAME = "checksums.jsonl"


class Checksums:
    """The checksums of the files below `directory`. One process notes; any reads. Threads may share an object."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._noted: dict[str, tuple[int, str]] | None = None
        self._lock = threading.Lock()

    def note(self, *files: Path, size: int | None = None) -> None:
        """Notes the first `size` bytes of each file; None: all. A file that has changed below what was noted before
        stays noted as it was, with a warning: a damage must not become what is right. A file that cannot be read or
        noted is a warning, because a run does not end for want of a checksum."""
        with self._lock:
            for file in files:
                try:
                    self._note(file, size)
                except (OSError, ValueError) as error:
                    logger.warning("file=%s: has no checksum: %s", file, error)

    def replace(self, file: Path) -> None:
        """Notes a file that was written anew."""
        with self._lock:
            try:
                (digest,) = _digests(file, (None,))
                self._write(self._name(file), *digest)
            except (OSError, ValueError) as error:
                logger.warning("file=%s: has no checksum: %s", file, error)

    def cut(self, file: Path, size: int) -> None:
        """Notes the first `size` bytes of a file that is cut back to them afterwards. A file that is damaged now stays
        noted as it was before the damage."""
        with self._lock:
            try:
                before = self._known().get(self._name(file))
                kept, *again = _digests(file, (size,) if before is None or before[0] < size else (size, before[0]))
                if again and again[0] != before:
                    logger.warning("file=%s: its first %s bytes are not those that were written", file, again[0][0])
                    return
                self._write(self._name(file), *kept)
            except (OSError, ValueError) as error:
                logger.warning("file=%s: has no checksum: %s", file, error)

    def problems(self) -> list[str]:
        """A sentence for each file that is missing, shorter, or other than what was noted. Raises ValueError for a
        line of checksums that is damaged."""
        return [text for name, noted in self._read().items() if (text := self._problem(name, *noted))]

    def _problem(self, name: str, size: int, xxh3: str) -> str:
        file = self._directory / name
        try:
            if file.suffix == ".jsonl" and file.with_suffix(".parquet").exists():
                return ""  # the table's part has become Parquet
            (digest,) = _digests(file, (size if file.suffix == ".jsonl" else None,))
        except OSError as error:
            return f"{name}: cannot be read ({error.strerror}), {size} bytes were written"
        if digest[0] != size:
            return f"{name}: has {digest[0]} bytes, {size} were written"
        return "" if digest[1] == xxh3 else f"{name}: its first {size} bytes are not those that were written"

    def _note(self, file: Path, size: int | None) -> None:
        name = self._name(file)
        if (before := self._known().get(name)) is None:
            (digest,) = _digests(file, (size,))
        else:
            again, digest = _digests(file, (before[0], size))
            if again != before:
                logger.warning("file=%s: its first %s bytes are not those that were written", file, before[0])
                return
        if digest != before:
            self._write(name, *digest)

    def _write(self, name: str, size: int, xxh3: str) -> None:
        known = self._known()
        append_lines(self._directory / _NAME, json_line({"file": name, "bytes": size, "xxh3": xxh3}))
        known[name] = (size, xxh3)

    def _known(self) -> dict[str, tuple[int, str]]:
        if self._noted is None:
            self._noted = self._read()
        return self._noted

    def _read(self) -> dict[str, tuple[int, str]]:
        noted, file = {}, self._directory / _NAME
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                entry = parsed(line)
                noted[str(entry["file"])] = (int(entry["bytes"]), str(entry["xxh3"]))
            except (ValueError, TypeError, KeyError):
                raise ValueError(
                    f"{file}, line {number}: is no checksum, so the file is damaged; remove that line"
                ) from None
        return noted

    def _name(self, file: Path) -> str:
        return str(file.relative_to(self._directory))


def _digests(file: Path, sizes: tuple[int | None, ...]) -> Iterator[tuple[int, str]]:
    """(bytes, xxh3) of the beginning of a file, for each of `sizes` in ascending order, None being all of it; fewer
    bytes where the file is shorter."""
    digest, read, digests = xxhash.xxh3_64(), 0, []
    with open(file, "rb") as stream:
        for size in sizes:
            while chunk := stream.read(_CHUNK if size is None else min(_CHUNK, size - read)):
                digest.update(chunk)
                read += len(chunk)
            digests.append((read, digest.hexdigest()))
    return iter(digests)

"""What a failure has to do with a file system that takes no more: its path, and how many bytes are free there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["FULL_BYTES", "disk_problem", "full_disk"]

FULL_BYTES = 1 << 20
"""A file system with fewer bytes free is full: less than a line of every table and the marker of a checkpoint need."""
_REFUSED = {errno.ENOSPC: "is full", errno.EDQUOT: "has no quota left", errno.EROFS: "is read-only"}


def disk_problem(error: BaseException, *directories: str | Path) -> str:
    """Why `error` is the fault of a file system, in one sentence with the path and the free bytes; "" for other errors.

    An error that names no file is taken to be about the directory with the fewest bytes free. An error that crossed a
    process is a RuntimeError with the text of the original.
    """
    for cause in _causes(error):
        number = cause.errno if isinstance(cause, OSError) else None
        if number not in _REFUSED:
            number = next((known for known in _REFUSED if os.strerror(known) in str(cause)), None)
        if number is not None:
            file = cause.filename if isinstance(cause, OSError) and isinstance(cause.filename, str) else ""
            fullest = min(directories, key=lambda directory: _free_bytes(_state(Path(directory))))
            return _sentence(Path(file or fullest), _REFUSED[number])
    return ""


def full_disk(directories: Sequence[str | Path]) -> str:
    """The sentence about the first of the directories whose file system is full; "" when none is."""
    for directory in directories:
        state = _state(Path(directory))
        if _free_bytes(state) < FULL_BYTES or _no_inodes(state):
            return _sentence(Path(directory), _REFUSED[errno.ENOSPC])
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and the members of groups."""
    waiting, seen = [error], set()
    while waiting:
        cause = waiting.pop(0)
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        waiting += [other for other in (cause.__cause__, cause.__context__) if other is not None]
        waiting += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()


def _sentence(path: Path, problem: str) -> str:
    state = _state(path)
    inodes = ", but no inode for another file" if _no_inodes(state) else ""
    free = f"{_free_bytes(state)} bytes are free{inodes}"
    return f"{path}: its file system {problem} ({free}); make room there, then go on with --resume latest"


def _state(path: Path) -> os.statvfs_result:
    """The state of the file system of the path, or of its nearest parent that exists."""
    for place in (path, *path.absolute().parents):
        try:
            return os.statvfs(place)
        except OSError:
            continue
    return os.statvfs("/")


def _free_bytes(state: os.statvfs_result) -> int:
    return state.f_bavail * state.f_frsize


def _no_inodes(state: os.statvfs_result) -> bool:
    """File systems that count no inodes say 0 for all of them."""
    return state.f_files > 0 and state.f_favail == 0

"""Where in a user's own files something happened: file and line, for messages about the user's functions."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

__all__ = ["defined_at", "described", "error_text", "raised_at"]

_LIBRARY_PATHS = tuple(  # where no file is the user's
    os.path.join(path, "")
    for path in {
        str(Path(__file__).parents[1]),
        sys.prefix,
        sysconfig.get_path("stdlib"),
        *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
    }
)


def described(error: BaseException) -> str:
    """`ValueError: message`, in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")


def raised_at(error: BaseException) -> str:
    """` (file.py:12)`: the innermost line of the user's own files that an exception passed; empty where there is none.

    An exception from a reward's process has its traceback as a note.
    """
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    for note in getattr(error, "__notes__", []):
        frames += re.findall(r'File "([^"]+)", line (\d+)', note)
    mine = [(file, line) for file, line in frames if _is_users(file)]
    return f" ({os.path.basename(mine[-1][0])}:{mine[-1][1]})" if mine else ""


def defined_at(function: Callable) -> str:
    """` (file.py:12)`: where a function of the user's is defined; empty for other functions."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not _is_users(code.co_filename):
        return ""
    return f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def error_text(error: BaseException) -> str:
    """The message of an exception; for one that the user's own code raised, its type and line as well."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and _is_users(frames[-1].filename):
        return f"{described(error)}{raised_at(error)}; mend the file"
    if not isinstance(error, (ValueError, RuntimeError, OSError)):
        return f"{described(error)}{raised_at(error)}"
    return str(error) or type(error).__name__


def _is_users(file: str) -> bool:
    # Compiled modules name their files as they were built: `pyarrow/error.pxi` is nowhere.
    return not file.startswith(("<", *_LIBRARY_PATHS)) and os.path.exists(file)

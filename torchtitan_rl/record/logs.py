"""Logs of one process: all records in a file of its own, warnings on the console too."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from torchtitan_rl.record.console.log_records import ConsoleHandler, JsonFormatter, worth_the_console
from torchtitan_rl.record.console.notices import is_json

__all__ = ["setup_rank_logging"]

_OWN_HANDLERS = ("vllm", "transformers")

_log_file: Path | None = None
_handlers: list[logging.Handler] = []
"""What a call of `setup_rank_logging` has added to the root logger."""


def setup_rank_logging(
    log_dir: str | Path, role: str, rank: int, world_size: int, level: str = "INFO", device: str | None = None
) -> Path:
    """Sends this process's logs to `log_dir/role-rank.log`, and warnings to stderr. Returns the file.

    The first line names role, rank, pid, host and device. Python warnings are captured. Other packages reach the
    console only with errors. A process has one log file at a time: a second call with the same directory returns that
    file and only redirects the handlers of packages imported since; a call with another directory, of the next run in
    this process, closes the file. Raises ValueError for a level that `logging` does not know.
    """
    global _log_file
    if level not in logging.getLevelNamesMapping():
        raise ValueError(f"log level={level!r}: is not known; use DEBUG, INFO, WARNING or ERROR")
    _adopt_third_parties()
    if _log_file is not None and _log_file.parent == Path(log_dir):
        return _log_file
    root = logging.getLogger()
    while _handlers:
        root.removeHandler(handler := _handlers.pop())
        handler.close()
    _log_file = Path(log_dir) / f"{role}-{rank}.log"
    _log_file.parent.mkdir(parents=True, exist_ok=True)

    file_handler = logging.FileHandler(_log_file, encoding="utf-8")
    file_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    console = ConsoleHandler(logging.WARNING)
    plain = logging.Formatter(f"{role}-{rank} %(levelname)s %(name)s: %(message)s")
    console.setFormatter(JsonFormatter(f"{role}-{rank}") if is_json() else plain)
    root.setLevel(level)
    has_console = any(
        isinstance(handler, ConsoleHandler) for handler in root.handlers
    )  # by the command, of a local run
    for handler in (file_handler,) if has_console else (file_handler, console):
        _handlers.append(handler)
        root.addHandler(handler)
        handler.filters.clear()  # Monarch adds a filter to every handler; each would prefix the same record again
    console.addFilter(worth_the_console)
    logging.captureWarnings(True)

    # Not through a logger: the line must be in the file at any level.
    file_handler.handle(
        logging.LogRecord(
            __name__,
            logging.INFO,
            __file__,
            0,
            f"{role} rank {rank} of {world_size}, pid {os.getpid()}, host {socket.gethostname()}, "
            f"device {device or _device(rank)}",
            None,
            None,
        )
    )
    return _log_file


def _adopt_third_parties() -> None:
    """Removes the handlers that other packages have installed, so that their records reach the root logger's handlers
    alone."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # read when vLLM is imported, which may be later
    for name in _OWN_HANDLERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
    root = logging.getLogger()
    for handler in list(root.handlers):
        # No subclasses: torchstore adds a StreamHandler to the root logger, subclasses write to files or to tests.
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


def _device(rank: int) -> str:
    from torchtitan_rl import platform

    kind = platform.device_type()
    return kind if kind == "cpu" else f"{kind}:{os.environ.get('LOCAL_RANK', rank)}"

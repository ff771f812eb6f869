"""Which log records reach the console."""

from __future__ import annotations

import logging
import sys

__all__ = ["Console", "worth_the_console"]

# torchtitan logs to "root".
_NOISY = (
    "PIL",
    "asyncio",
    "datasets",
    "filelock",
    "fsspec",
    "httpx",
    "huggingface_hub",
    "matplotlib",
    "monarch",
    "root",
    "torch",
    "torchstore",
    "torchtitan",
    "transformers",
    "urllib3",
    "vllm",
)


class Console(logging.StreamHandler):
    """Writes to the current `sys.stderr`: while a progress bar is shown, the bar replaces `sys.stderr` and prints lines
    above itself."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self):
        return sys.stderr


def worth_the_console(record: logging.LogRecord) -> bool:
    """Whether a record is an error, or a warning of this package or the user's code. Warnings of other packages go to
    the log file alone."""
    if record.levelno >= logging.ERROR:
        return True
    if record.name == "py.warnings":  # the message starts with the file that warns
        return "/site-packages/" not in record.getMessage().split(": ", 1)[0]
    return record.name.split(".", 1)[0] not in _NOISY

"""Which log records a person sees, and where."""

from __future__ import annotations

import logging
import sys

__all__ = ["Console", "worth_the_console"]

# "root" is what torchtitan logs to.
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
    """Writes to whatever sys.stderr is at that moment: a progress bar redirects it to lines above itself."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)

    @property
    def stream(self):
        return sys.stderr


def worth_the_console(record: logging.LogRecord) -> bool:
    """Our own warnings and everybody's errors; other packages' warnings are in the log."""
    if record.levelno >= logging.ERROR:
        return True
    if record.name == "py.warnings":  # the message starts with the file that is to blame
        return "/site-packages/" not in record.getMessage().split(": ", 1)[0]
    return record.name.split(".", 1)[0] not in _NOISY

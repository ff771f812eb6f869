"""Records of `logging` on the console: which ones reach it, and as what."""

from __future__ import annotations

import logging
import os
import sys

from torchtitan_rl.record.console.notices import JSON_LOGS, as_object

__all__ = ["ConsoleHandler", "JsonFormatter", "use_json", "worth_the_console"]

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


class ConsoleHandler(logging.StreamHandler):
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


def use_json(on: bool) -> None:
    """Makes the console of this process JSON, or plain again. Processes that it starts later do as it does."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, JsonFormatter)]:
        root.removeHandler(handler)
    os.environ.pop(JSON_LOGS, None)
    if on:
        os.environ[JSON_LOGS] = "1"
        console = ConsoleHandler(logging.WARNING)
        console.setFormatter(JsonFormatter("controller"))
        console.addFilter(worth_the_console)
        root.addHandler(console)
        logging.captureWarnings(True)


class JsonFormatter(logging.Formatter):
    """A record of `logging` as one object, with the event `log`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields = {"message": record.getMessage(), "logger": record.name, "process": self._process}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return as_object("log", record.levelname.lower(), fields)

"""What reaches the console, and as what: texts, or with `--json-logs` objects with time, level, event and fields."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import datetime
from typing import Any, TextIO

from torchtitan_rl.record.json_lines import encode

__all__ = ["Console", "JsonFormatter", "as_object", "is_json", "say", "use_json", "worth_the_console"]

_VARIABLE = "TORCHTITAN_RL_JSON_LOGS"

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


def use_json(on: bool) -> None:
    """Makes the console of this process JSON, or plain again. Processes that it starts later do as it does."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, JsonFormatter)]:
        root.removeHandler(handler)
    os.environ.pop(_VARIABLE, None)
    if on:
        os.environ[_VARIABLE] = "1"
        console = Console(logging.WARNING)
        console.setFormatter(JsonFormatter("controller"))
        console.addFilter(worth_the_console)
        root.addHandler(console)
        logging.captureWarnings(True)


def is_json() -> bool:
    """Whether the console of this process is JSON."""
    return os.environ.get(_VARIABLE) == "1"


def say(text: str, *, event: str, level: str = "info", to: TextIO | None = None) -> None:
    """Prints to stderr, or to another stream: a text, or where JSON is wanted an object with the text as `message`."""
    print(as_object(event, level, {"message": text}) if is_json() else text, file=to or sys.stderr, flush=True)


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


def as_object(event: str, level: str, fields: dict[str, Any]) -> str:
    """A line of the console as JSON."""
    time = datetime.now().astimezone().isoformat(timespec="milliseconds")
    line = {"time": time, "level": level, "event": event, "fields": encode(fields)}
    return json.dumps(line, ensure_ascii=True, default=str)

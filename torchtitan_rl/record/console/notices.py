"""Notices to the person who runs a command: texts, or with `--json-logs` objects with time, level, event, fields."""

from __future__ import annotations

import json
import os
import sys
from datetime import datetime
from typing import Any, TextIO

from torchtitan_rl.record.json_lines import encode

__all__ = ["JSON_LOGS", "as_object", "is_json", "say"]

JSON_LOGS = "TORCHTITAN_RL_JSON_LOGS"
"""The environment variable that makes the console JSON, in this process and in those that it starts."""


def is_json() -> bool:
    """Whether the console of this process is JSON."""
    return os.environ.get(JSON_LOGS) == "1"


def say(text: str, *, event: str, level: str = "info", to: TextIO | None = None) -> None:
    """Prints to stderr, or to another stream: a text, or where JSON is wanted an object with the text as `message`.
    A notice that stderr does not take is lost: its reader is gone, or its disk is full. Whoever gives it goes on to do
    what it tells of, and to its exit status."""
    stream = to or sys.stderr
    try:
        print(as_object(event, level, {"message": text}) if is_json() else text, file=stream, flush=True)
    except OSError:
        if stream is not sys.stderr:
            raise


def as_object(event: str, level: str, fields: dict[str, Any]) -> str:
    """A line of the console as JSON."""
    time = datetime.now().astimezone().isoformat(timespec="milliseconds")
    line = {"time": time, "level": level, "event": event, "fields": encode(fields)}
    return json.dumps(line, ensure_ascii=True, default=str)

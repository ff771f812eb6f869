"""Reading a line of JSON that anybody may have written."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["parsed"]


def parsed(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for whatever is none, also for one that is nested thousands deep,
    where `json.loads` raises RecursionError, which no reader of files expects."""
    try:
        return json.loads(text)
    except RecursionError:
        whole = text.decode(errors="replace") if isinstance(text, bytes) else text
        raise json.JSONDecodeError("Nested too deeply", whole, 0) from None

"""What an engine's thread is told to do between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Command"]


@dataclass(slots=True)
class Command:
    """An instruction that every rank executes before the next engine step. Data only: rank 0 broadcasts commands."""

    kind: Literal["add", "cancel", "load", "company", "load_adapters", "sleep", "wake"] = "add"
    argument: Any = field(default_factory=list)
    """`add`: a list of (request id, request). `cancel`: a list of `Request.number`. `load`: a policy version.
    `company`: a list of `record.schedule.Companion`. `load_adapters`: a policy version and a slot. `wake`: a part's
    name. `sleep`: unused."""
    holds_step: bool = False
    """Whether another command is executed before the engine steps."""

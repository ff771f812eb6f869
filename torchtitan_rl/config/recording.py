"""What a run records beside its JSON lines, and where it sends it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RecordConfig"]


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """What is recorded of a run beside `metrics.jsonl`, and where it goes. Nothing here changes what is trained."""

    health: bool = True
    """Whether `status.json` says what the run is doing, and the table `events` which warnings it gave."""

"""What a run records beside its JSON lines, and where it sends it."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["RecordConfig"]


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """What is recorded of a run beside `metrics.jsonl`, and where it goes. Nothing here changes what is trained."""

    health: bool = True
    """Whether `status.json` says what the run is doing, and the table `events` which warnings it gave."""
    diagnose: bool = True
    """Whether the rules of `torchtitan-rl diagnose` look at the run while it goes on and warn once each, and the table
    `samples` has the memory of the run's processes."""
    thresholds: dict[str, float] = field(default_factory=dict)
    """Rule -> threshold, in place of the rule's own; docs/diagnose.md has the rules."""

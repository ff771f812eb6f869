"""What a run records beside its JSON lines, and where it sends it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RecordConfig"]


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """What is recorded of a run beside `metrics.jsonl`, and where it goes. Nothing here changes what is trained."""

    explain_mismatch_every: int = 0
    """Optimizer steps between explanations of the gap between trainer and generators (docs/mismatch.md); 0: none."""
    explain_mismatch_rollouts: int = 8
    """Rollouts that are scored again for each explanation."""

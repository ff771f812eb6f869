"""Which checkpoints of a run are deleted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchtitan_rl.weights import checkpoint

__all__ = ["position", "complete", "superfluous"]

_PHASES = ("supervised", "preference", "step")
_REINFORCEMENT = _PHASES.index("step")


def position(name: str) -> tuple[int, int] | None:
    """Place of a checkpoint in its run by the name of its directory, `supervised-N` before `preference-N` before
    `step-N`; None for another name. Example: `position("step-80") == (2, 80)`."""
    phase, _, step = name.rpartition("-")
    if phase not in _PHASES or not step.isdecimal():
        return None
    return _PHASES.index(phase), int(step)


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    paths = [path for path in checkpoints.glob("*-*") if position(path.name) and checkpoint.is_complete(path)]
    return sorted(paths, key=lambda path: position(path.name))


def superfluous(names: list[str], *, keep_last: int, keep_every: int, accuracies: Mapping[str, float]) -> list[str]:
    """The checkpoints to delete among `names`, oldest first. The newest one stays always.

    Kept are the newest `keep_last` (-1: all), the first one at or after each multiple of `keep_every` reinforcement
    steps (0: none; a batch of several optimizer steps may end past the multiple), and the one with the highest
    accuracy. `accuracies` are those of the evaluation that decides, by step of the reinforcement phase; of equal
    accuracies the later step counts.
    """
    if keep_last < 0:
        return []
    kept, multiples = set(names[-keep_last:]), 0
    for name in names:
        phase, step = position(name)
        if keep_every and phase == _REINFORCEMENT and (step == 0 or step // keep_every > multiples):
            multiples = step // keep_every
            kept.add(name)
    scored = [(accuracies[step], place) for place, step in enumerate(_steps(names)) if step in accuracies]
    if scored:
        kept.add(names[max(scored)[1]])
    return [name for name in names if name not in kept]


def _steps(names: list[str]) -> list[str]:
    """Steps of the reinforcement phase as text; empty for a checkpoint of an earlier phase."""
    return [str(step) if phase == _REINFORCEMENT else "" for phase, step in map(position, names)]

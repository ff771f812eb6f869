"""Where a run came from that is a fork: `fork.json` in its directory."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["ForkPoint", "fork_point"]

_NAME = "fork.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkPoint:
    """The checkpoint of another run from which a run goes on, and what is changed from there."""

    parent: str
    """The directory of the other run, as an absolute path."""
    step: int
    """Steps of the reinforcement phase that both runs have in common."""
    checkpoint: str
    """The checkpoint's name, such as `step-80`; the fork has a copy."""
    checkpoint_xxh3: str
    """Hash of the checksums of the checkpoint's files."""
    changes: dict[str, tuple[Any, Any]]
    """Dotted path -> (the parent's value, the fork's value). A changed source of a function is a change too."""
    new_draws: bool = False
    """Whether the fork draws anew from here on, because its seed or its task's data are others."""
    settings: list[str] = field(default_factory=list)
    """`PATH=VALUE` of each field that was asked for; empty in a fork of a version that did not note them."""

    def write(self, directory: Path) -> None:
        (directory / _NAME).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    def summary(self) -> str:
        """Example: `fork of runs/first at step 80: algorithm.loss_config.clip_high 0.28 -> 0.3`."""
        shown = ", ".join(f"{path} {before} -> {now}" for path, (before, now) in self.changes.items())
        draws = ", new draws" if self.new_draws else ""
        return f"fork of {self.parent} at step {self.step}: {shown or 'nothing changed'}{draws}"


def fork_point(directory: Path) -> ForkPoint | None:
    """Where the run in a directory came from; None for a run that is no fork. Raises ValueError for a file that is not
    what a fork writes."""
    file = directory / _NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        changes = {path: (before, now) for path, (before, now) in content.pop("changes").items()}
        return ForkPoint(**content, changes=changes)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file}: is not what a fork writes ({error}); put the file back from a copy") from error

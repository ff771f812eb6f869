"""What a run records beside its JSON lines, and where it sends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["RecordConfig", "WandbConfig"]


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """A run of Weights & Biases, with its files in the run's directory."""

    project: str = "torchtitan-rl"
    """Project that the run belongs to."""
    entity: str = ""
    """Team or user that the project belongs to; empty: the default one of the key."""
    group: str = ""
    """Runs with the same group are shown together, such as the seeds of one setting; empty: none."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files that `wandb sync` uploads later; `online` uploads during the run and needs a key."""


@dataclass(kw_only=True, slots=True)
class RecordConfig:
    """What is recorded of a run beside `metrics.jsonl`, and where it goes. Nothing here changes what is trained."""

    tensorboard: bool = False
    """Whether metrics also go to event files for TensorBoard, in the run's directory. Needs the extra `tensorboard`."""
    wandb: WandbConfig | None = None
    """Where metrics go at Weights & Biases; None: nowhere. Needs the extra `wandb`."""
    sinks: list[Callable[..., Any]] = field(default_factory=list)
    """Sinks of one's own: functions `(line) -> None`, called with every line of metrics, or classes of `Listener`, made
    without arguments. Each is called in a thread of its own; a sink that fails or hangs is reported once."""

"""What a run records beside its JSON lines, and where it sends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge

from torchtitan_rl.constraints import Check, Hint

__all__ = ["ProfileConfig", "RecordConfig", "WandbConfig", "steps_of"]


def _is_project(name: str) -> bool:
    """Whether Weights & Biases takes a name for a project."""
    return bool(name) and not set(name) & set("/\\#?%:")


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    """A run of Weights & Biases, with its files in the run's directory."""

    project: Annotated[str, Check(_is_project, "is no name; use letters, digits, - and _")] = "torchtitan-rl"
    """Project that the run belongs to."""
    entity: str = ""
    """Team or user that the project belongs to; empty: the default one of the key."""
    group: str = ""
    """Runs with the same group are shown together, such as the seeds of one setting; empty: none."""
    mode: Literal["offline", "online"] = "offline"
    """`offline` writes files that `wandb sync` uploads later; `online` uploads during the run and needs a key."""


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """Traces by torch.profiler, in `timeline/profile/` of the run's directory."""

    steps: list[int] = field(default_factory=list)
    """Optimizer steps of the reinforcement phase, from 1; each is profiled with its whole batch: generation, training,
    publication. `train --profile 3,5-6` sets [3, 5, 6]."""
    ranks: list[str] = field(default_factory=lambda: ["policy-0"])
    """The ranks, named as their logs are: role and rank, such as `policy-0`, `generator-0-0` (replica 0, rank 0)."""


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
    tensorboard: bool = False
    """Whether metrics also go to event files for TensorBoard, in the run's directory. Needs the extra `tensorboard`."""
    wandb: WandbConfig | None = None
    """Where metrics go at Weights & Biases; None: nowhere. Needs the extra `wandb`."""
    sinks: list[Callable[..., Any]] = field(default_factory=list)
    """Sinks of one's own: functions `(line) -> None`, called with every line of metrics, or classes of `Listener`, made
    without arguments. Each is called in a thread of its own; a sink that fails or hangs is reported once."""
    schedule: bool = True
    """Whether the engines record what they executed when, in `schedule/`, for `torchtitan-rl replay RUN`."""
    timeline: bool = False
    """Whether every process records what it does when, for `torchtitan-rl timeline RUN`."""
    eval_completions: Annotated[int, Ge(0), Hint("use 0 for none")] = 64
    """Tasks of each evaluation, the first ones, whose completions the table `evaluations` keeps, greedy ones and
    samples; 0: none."""
    explain_mismatch_every: Annotated[int, Ge(0), Hint("use 0 for none")] = 0
    """Optimizer steps between explanations of the gap between trainer and generators (docs/mismatch.md); 0: none."""
    explain_mismatch_rollouts: Annotated[int, Ge(1)] = 8
    """Rollouts that are scored again for each explanation."""
    profile: ProfileConfig = field(default_factory=ProfileConfig)


_MOST_STEPS = 10_000
"""Steps of a range of `--profile`: traces of more fill a disk."""


def steps_of(text: str) -> list[int]:
    """The steps of a list such as "3,5-6": [3, 5, 6]. Raises ValueError for anything else."""
    steps = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(first) <= int(last))):
            raise ValueError(f"--profile={text!r}: {part!r} is no step and no range; write steps as in 3,5-6")
        if int(last or first) - int(first) >= _MOST_STEPS:
            raise ValueError(
                f"--profile={text!r}: {part!r} is more than {_MOST_STEPS:,} steps, and each leaves a trace; name fewer"
            )
        steps |= set(range(int(first), int(last or first) + 1))
    return sorted(steps)

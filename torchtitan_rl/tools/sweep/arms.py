"""The arms of a sweep: which combinations of values there are, and whether a fork can have them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchtitan_rl.config.config_difference import LABELS, changes_future_only, differences
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.recorded import recorded_config
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.train.fork import apply_settings
from torchtitan_rl.validation.run import validate

__all__ = ["Arm", "arms_of", "read_seeds"]

_MAX_DIRECTORY = 200
"""Most bytes of the name of an arm's directory. File systems take 255, and names of files are made of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One combination of values. Example: `Arm(settings=("trainer.optimizer.lr=5e-4",), is_base=False)`."""

    settings: tuple[str, ...]
    """`PATH=VALUE` of each field that the sweep sets."""
    is_base: bool
    """Whether the config has these values anyway."""

    @property
    def name(self) -> str:
        return " ".join(self.settings)

    @property
    def directory(self) -> str:
        """The name of the directory of the arm's run of one seed; the base arm's run is the parent of the forks."""
        return "parent" if self.is_base else re.sub(r"[^\w.=+-]+", "_", ",".join(self.settings))


def read_seeds(text: str, option: str = "--seeds") -> list[int]:
    """The seeds of `0..4` (both ends count) or `0,3,7`. Raises ValueError, which names the option, for another form,
    none, or one twice."""
    seeds: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", part.strip())
        if match is None:
            raise ValueError(f"{option}={text}: is no list of seeds; write 0..4 or 0,3,7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(
                f"{option}={text}: {part.strip()} has no seed, it ends before it begins; write 0..4 or 0,3,7"
            )
        seeds += range(first, last + 1)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"{option}={text}: has a seed twice, whose runs would be copies; leave one out")
    return seeds


def arms_of(
    config: RunConfig, choices: Sequence[str], *, check: Callable[[RunConfig], object] = lambda config: None
) -> list[Arm]:
    """Every combination of the values of `choices`, each `PATH=VALUE,VALUE,...`, in their order. `check` raises
    ValueError for an arm's settled config that cannot run where the sweep does.

    Raises ValueError for a field that does not exist or that a fork cannot change, for values that a config cannot
    have, for two arms that are the same, for a directory whose name is too long, and for fewer than two arms.
    """
    values = [_settings(choice) for choice in choices]
    plain = json.loads(json.dumps(resolved(settled(config))))
    arms, changes = [], []
    for settings in itertools.product(*values):
        changed, _ = recorded_config(plain, "config")  # as a fork reads it from the checkpoint
        apply_settings(changed, list(settings))
        now = json.loads(json.dumps(resolved(settled(changed))))
        change = {path: pair for path, pair in differences(plain, now).items() if path not in LABELS}
        if fixed := sorted(path for path in change if not changes_future_only(path)):
            raise ValueError(
                f"--set {fixed[0]}: decides what the arms share (tasks, random numbers, batches, or what a checkpoint "
                "holds), so no fork can change it; sweep another field, or compare runs of their own"
            )
        validate(changed)
        check(settled(changed))
        if change in changes:
            same = " ".join(arms[changes.index(change)].settings)
            raise ValueError(f"--set {' '.join(settings)}: is the same arm as {same}; leave one of the two out")
        arms.append(Arm(settings=settings, is_base=not change))
        changes.append(change)
    if len(arms) < 2:
        raise ValueError(f"--set {' '.join(choices)}: is one arm, which has nothing beside it; give two values or more")
    if len({arm.directory for arm in arms}) < len(arms):
        raise ValueError("--set: two arms would have the same directory; write their values with other characters")
    if (longest := max(len(arm.directory.encode()) for arm in arms)) > _MAX_DIRECTORY:
        raise ValueError(
            f"--set: a directory of an arm would have a name of {longest} bytes, {_MAX_DIRECTORY} are possible; sweep "
            "fewer fields at once"
        )
    return arms


def _settings(choice: str) -> list[str]:
    """`PATH=VALUE` of each value of `PATH=VALUE,VALUE,...`."""
    path, equals, values = choice.partition("=")
    if not equals or not path or not all(values.split(",")):
        raise ValueError(
            f"--set={choice!r}: is no choice of values; write PATH=VALUE,VALUE, as in trainer.optimizer.lr=1e-3,5e-4"
        )
    return [f"{path.removeprefix('--')}={value.strip()}" for value in values.split(",")]

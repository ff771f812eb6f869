"""What a sweep is to do, and the file that says so in its directory."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.config.config_difference import LABELS, differences
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.record.attempts import lock_file
from torchtitan_rl.record.json_lines import encode
from torchtitan_rl.tools.sweep.arms import Arm

__all__ = ["Plan", "checkpoint_cadence", "locked"]

_NAME = "sweep.json"
_BEGUN = "sweep."
"""How the name of that file begins, and of a file that is renamed to it once it is whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A sweep before anything has run."""

    directory: Path
    config: RunConfig
    """The config of the parents, whose seed does not count."""
    arms: list[Arm]
    seeds: list[int]
    at: int
    """The step of reinforcement until which the arms share everything."""
    keep_all: bool = False
    """Whether every arm gets every seed, however bad it is."""

    @property
    def base(self) -> Arm:
        """The arm to which differences are given: the unchanged config, or else the first arm."""
        return next((arm for arm in self.arms if arm.is_base), self.arms[0])

    def run(self, arm: Arm, seed: int) -> Path:
        """The directory of an arm's run of one seed."""
        return self.directory / f"seed-{seed}" / arm.directory

    def parent(self, seed: int) -> Path:
        return self.directory / f"seed-{seed}" / "parent"

    def require_own(self) -> None:
        """Raises ValueError where the directory holds another sweep or something else."""
        if self.directory.exists() and not self.directory.is_dir():
            raise ValueError(f"output_dir={str(self.directory)!r}: is a file; give a directory")
        # Listed before the file is read: another process of the sweep may begin now, and writes other files after it.
        names = [path.name for path in self.directory.iterdir()] if self.directory.is_dir() else []
        try:
            before = json.loads((self.directory / _NAME).read_text(encoding="utf-8"))
        except FileNotFoundError:
            if not all(name.startswith(_BEGUN) for name in names):
                raise ValueError(
                    f"output_dir={str(self.directory)!r}: holds files that belong to no sweep; give a directory of its "
                    "own"
                ) from None
            return
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.directory / _NAME}: is damaged ({error}); put it back from a copy") from error
        now = self._content()
        changed = [name for name in ("arms", "seeds", "at") if before.get(name) != now[name]]
        pairs = {name: (before.get(name), now[name]) for name in changed}
        config_changes = differences(before["config"], now["config"]) if "config" in before else {}
        pairs |= {f"config {path}": pair for path, pair in config_changes.items() if path not in LABELS}
        if pairs:
            name, (before_value, value) = next(iter(pairs.items()))
            raise ValueError(
                f"output_dir={str(self.directory)!r}: holds another sweep, whose {name} is {before_value!r} and not "
                f"{value!r}; give another directory, or the same command as before"
            )

    def write(self) -> None:
        """Writes the file that `require_own` reads, unless it is there. Raises ValueError as that does, where another
        process has begun another sweep in the directory since."""
        file = self.directory / _NAME
        if not file.exists():
            beside = self.directory / f"{_BEGUN}{uuid.uuid4().hex}"  # another process of the sweep may write its own
            beside.write_text(json.dumps(self._content(), indent=1) + "\n", encoding="utf-8")
            os.replace(beside, file)
        self.require_own()

    def _content(self) -> dict[str, Any]:
        content = {
            "arms": [list(arm.settings) for arm in self.arms],
            "seeds": self.seeds,
            "at": self.at,
            "config": resolved(settled(self.config)),
        }
        return json.loads(json.dumps(encode(content)))


def checkpoint_cadence(config: RunConfig, at: int) -> tuple[int, int]:
    """`controller.checkpoint_every` and `keep_every` of a parent, which must have a checkpoint after step `at` and keep
    it. Raises ValueError for a step without one."""
    controller, per_batch = config.controller, config.algorithm.steps_per_batch
    if not 0 <= at < controller.num_steps or at % per_batch:
        multiples = "" if per_batch == 1 else f" and a multiple of the {per_batch} steps of a batch"
        raise ValueError(
            f"--at={at}: must be from 0 (after the warm start) to below controller.num_steps={controller.num_steps}"
            f"{multiples}; use such a step"
        )
    every = controller.checkpoint_every
    if every and at % every:
        raise ValueError(
            f"--at={at}: controller.checkpoint_every={every} writes no checkpoint after this step; use a multiple, or "
            "leave checkpoint_every 0"
        )
    if not every:  # only the checkpoint of the fork point, and the last one
        preference = 0 if config.preference is None else config.preference.num_steps
        every = at or 1 + max(controller.num_steps, config.supervised.num_steps, preference)
    return every, at or every * (controller.num_steps // every + 1)


@contextmanager
def locked(directory: Path, seeds: Iterable[int]) -> Iterator[None]:
    """Keeps other processes from training these seeds of a sweep. Raises ValueError where one is at work on them, and
    where the file system has no locks."""
    with ExitStack() as files:
        for seed in seeds:
            seed_dir = directory / f"seed-{seed}"
            seed_dir.mkdir(exist_ok=True)
            file = files.enter_context((seed_dir / "sweep.lock").open("w"))
            if not lock_file(file, directory):
                raise ValueError(
                    f"output_dir={str(directory)!r}: a sweep is at work there, on seed {seed}; wait for its end, or "
                    "give another directory"
                )
        yield

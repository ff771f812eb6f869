"""A fork: a run of its own that goes on from another run's checkpoint, with other settings.

The fork's directory holds what the other run's directory held when that checkpoint was written: the checkpoint, the
lines of metrics and the records up to there. From then on it is a run like any other, and goes on as a resumed run
does. Files that never change are shared between the directories by hard links where the file system allows it, and
nothing is written into the other run's directory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.compute
import pyarrow.parquet
import xxhash

from torchtitan_rl.config.config_difference import LABELS, changes_draws, changes_future_only, differences
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.overrides import apply_overrides
from torchtitan_rl.config.recorded import recorded_config
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.values import module_of_file
from torchtitan_rl.record.fork_point import ForkPoint, fork_point
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.train.retention import complete, position
from torchtitan_rl.weights import checkpoint

__all__ = ["apply_settings", "existing_fork", "make_fork", "plan_fork"]

_TABLES = ("attempts", "rollouts", "evaluations", "ledger", "versions")
"""The tables whose records count in the fork too. Events and samples are about the other run's processes."""


def plan_fork(
    parent: Path, step: int, settings: list[str], *, name: str = "", output_dir: str = "", new_draws: bool = False
) -> tuple[RunConfig, ForkPoint]:
    """The config of a fork and where it comes from. `settings` are `PATH=VALUE`. Nothing is written.

    Raises ValueError for a directory without a run, a step without a usable checkpoint, a field that does not exist or
    that a fork cannot change, and for one that changes the draws unless `new_draws`.
    """
    saved = _checkpoint_at(parent, step)
    plain = json.loads((saved / checkpoint.RUN_CONFIG).read_text(encoding="utf-8"))
    config, changed_sources = recorded_config(plain, f"run={str(parent)!r}: its config")
    apply_settings(config, settings)
    config.name, config.output_dir = name or f"{config.name}-at-{step}", output_dir
    now = json.loads(json.dumps(resolved(settled(config))))
    changes = {path: pair for path, pair in differences(plain, now).items() if path not in LABELS}
    _require_changeable(changes.keys() - changed_sources.keys(), step, new_draws)
    if new_draws and config.algorithm.max_policy_lag:
        raise ValueError(
            f"--new-draws: with algorithm.max_policy_lag={config.algorithm.max_policy_lag} the checkpoint holds draws "
            "that are under way; fork without it, or begin a new run"
        )
    digest = xxhash.xxh3_64(checkpoint.checksums_file(saved).read_bytes()).hexdigest()
    return config, ForkPoint(
        parent=str(parent.resolve()),
        step=step,
        checkpoint=saved.name,
        checkpoint_xxh3=digest,
        changes=changes,
        new_draws=new_draws,
        settings=settings,
    )


def apply_settings(config: RunConfig, settings: list[str]) -> None:
    """Sets fields of a config, each by `PATH=VALUE`. Raises ValueError as `plan_fork` does."""
    for setting in settings:
        path, equals, _ = setting.partition("=")
        if not equals or not path or path.startswith("-"):
            raise ValueError(f"--set={setting!r}: is no setting; write PATH=VALUE, as in algorithm.group_size=16")
        apply_overrides(config, [f"--{setting}"])


def existing_fork(directory: Path, parent: Path, step: int, settings: list[str]) -> RunConfig | None:
    """The config of the fork in a directory, to go on with it; None where there is no fork yet. The parent is not read:
    it may have deleted the checkpoint since. Raises ValueError for another fork than `plan_fork` would plan."""
    point = fork_point(directory)
    if point is None:
        return None
    place = f"output_dir={str(directory)!r}:"
    if (point.parent, point.step) != (str(parent.resolve()), step):
        raise ValueError(f"{place} holds a {point.summary()}; give another directory, or that parent and step")
    plain = json.loads(RunDir(directory).config_file.read_text(encoding="utf-8"))
    for setting in settings:  # the recorded config names functions of these files already
        if file := re.match(r"[^=]+=([^:()]+\.py):", setting):
            module_of_file(file[1], f"--set={setting}")
    config, changed_sources = recorded_config(plain, f"{place} its config")
    apply_settings(config, settings)
    changes = differences(plain, resolved(settled(config))).keys() - changed_sources.keys()
    left_out = {_path(setting) for setting in point.settings} - {_path(setting) for setting in settings}
    if changes or left_out:
        fault = f"{min(changes)} is set otherwise now" if changes else f"{min(left_out)} is not set now"
        raise ValueError(
            f"{place} holds a {point.summary()}, and {fault}; give another directory, or the settings that it was made "
            "with"
        )
    return config


def _path(setting: str) -> str:
    """The field that a setting sets, as Python writes it."""
    return setting.partition("=")[0].replace("-", "_")


def _require_changeable(paths: set[str], step: int, new_draws: bool) -> None:
    """Raises ValueError for a field that a fork cannot change."""
    past = sorted(path for path in paths if changes_draws(path))
    fixed = sorted(path for path in paths if not changes_draws(path) and not changes_future_only(path))
    if fixed:
        raise ValueError(
            f"--set {fixed[0]}: decides what the checkpoint holds, so a fork cannot change it; begin a new run with "
            "torchtitan-rl train"
        )
    if past and not new_draws:
        raise ValueError(
            f"--set {past[0]}: changes which tasks or random numbers the run drew before step {step}, and the fork "
            "would share none from there on; add --new-draws to draw anew, or leave it out"
        )
    if new_draws and not past:
        raise ValueError("--new-draws: nothing that is set changes the draws; add --set seed=N, or leave it out")


def _checkpoint_at(parent: Path, step: int) -> Path:
    """The complete, undamaged checkpoint after a step of the reinforcement phase. Raises ValueError without one."""
    where = f"run={str(parent)!r}:"
    if not (parent / "checkpoints").is_dir():
        raise ValueError(f"{where} is no run directory, it has no checkpoints; give one, such as runs/first")
    steps = [str(position(path.name)[1]) for path in complete(parent / "checkpoints") if path.name.startswith("step-")]
    if str(step) not in steps:
        there = f"there are checkpoints at {', '.join(steps)}" if steps else "it has no checkpoint of reinforcement"
        raise ValueError(
            f"--at={step}: {parent} has no checkpoint after this step, {there}; give one of them, or train with "
            "--controller.checkpoint-every and --controller.keep-last -1"
        )
    saved = RunDir(parent).checkpoint_path(step)
    if problem := checkpoint.problem(saved):
        raise ValueError(f"--at={step}: the checkpoint cannot be used: {problem}; give another step")
    return saved


def make_fork(config: RunConfig, point: ForkPoint) -> RunDir:
    """Makes the directory of a fork, `config.output_dir`, ready to be resumed. The directory appears whole or not at
    all. Raises ValueError where it is in use or cannot be written."""
    path, parent = Path(config.output_dir), RunDir(point.parent)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"output_dir={str(path)!r}: holds files already; a fork needs a directory of its own")
    half = path.with_name(f"{path.name}.forking")
    try:
        shutil.rmtree(half, ignore_errors=True)
        run_dir = RunDir(half)
        for directory in (run_dir.logs, run_dir.checkpoints):
            directory.mkdir(parents=True)
        _copy(parent, run_dir, point)
        run_dir.write_config(resolved(settled(config)))
        point.write(half)
        if path.exists():
            path.rmdir()
        half.rename(path)
    except OSError as error:
        shutil.rmtree(half, ignore_errors=True)
        raise ValueError(
            f"output_dir={str(path)!r}: the fork could not be written ({error}); mend that, or choose another directory"
        ) from error
    except BaseException:
        shutil.rmtree(half, ignore_errors=True)
        raise
    return RunDir(path)


def _copy(parent: RunDir, run_dir: RunDir, point: ForkPoint) -> None:
    """Copies a checkpoint, and the metrics and records up to it, into the directory of a fork."""
    saved, copied = parent.checkpoints / point.checkpoint, run_dir.checkpoints / point.checkpoint
    size = checkpoint.read_state(saved)["metrics_bytes"]
    lines = parent.metrics_file.read_bytes()[:size]
    if len(lines) < size or (size and not lines.endswith(b"\n")):
        raise ValueError(
            f"{parent.metrics_file}: its first {size} bytes are not the lines before {point.checkpoint}: the run went "
            "on from an earlier step since; fork at a later one"
        )
    run_dir.metrics_file.write_bytes(lines)
    for file in sorted(saved.rglob("*")):
        if file.is_file() and file.name != checkpoint.MARKER:
            _link(file, copied / file.relative_to(saved))
    checkpoint.mark(copied)
    checkpoint.point_to(copied)
    for name in _TABLES:
        for part in parent.tables[name].files():
            copy = run_dir.tables[name].directory / part.name
            if part.suffix == ".jsonl":
                copy.parent.mkdir(exist_ok=True)
                content = part.read_bytes()
                copy.write_bytes(content[: content.rfind(b"\n") + 1])  # the parent may be writing a line
            elif name == "attempts" or _first_step(part) <= point.step:
                _link(part, copy)


def _first_step(part: Path) -> int:
    """The smallest step of a table's part."""
    first: Any = pyarrow.compute.min(pyarrow.parquet.read_table(part, columns=["step"])["step"])
    return first.as_py() or 0


def _link(file: Path, copy: Path) -> None:
    """The same file under another name, or a copy where the file system has no links. Nobody writes into files of a
    checkpoint or into Parquet: they are replaced as a whole."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(file, copy)
    except OSError:
        shutil.copyfile(file, copy)

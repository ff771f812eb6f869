"""Going on with a run from one of its checkpoints."""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.config.config_difference import changes_rollouts, differences, is_harmless, leaves
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.policy_weights import PolicyWeights
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.record import attempts
from torchtitan_rl.record.fork_point import ForkPoint, fork_point
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.rollout.draws import Draws
from torchtitan_rl.train.checkpoints import checkpointed_roles
from torchtitan_rl.train.retention import position
from torchtitan_rl.train.run_record import begin_record
from torchtitan_rl.train.start import output_path
from torchtitan_rl.types.run_state import RunState, set_random_states
from torchtitan_rl.weights import checkpoint

__all__ = ["Resumption", "find", "place", "open_copy", "open_run", "state_of", "restore"]


_ADAPTED = {"algorithm.kl_coef": ("kl_coef",), "algorithm.entropy_coef": ("entropy_coef", "batch_entropy")}
"""Field of the config -> what a run's state has of it, adapted batch by batch. A fork that changes the field begins
with the field."""


@dataclass(kw_only=True, slots=True)
class Resumption:
    """Where a run goes on. `checkpoint` is None for a run that was killed before its first checkpoint: it begins
    again, in the same directory."""

    path: Path
    """The run directory."""
    checkpoint: Path | None
    state: dict = field(default_factory=dict)
    """`checkpoint.read_state`, empty without a checkpoint."""
    new_draws: bool = False
    """Whether the draws begin anew in the next slot: at the fork point of a fork with another seed or other data."""
    plays_again: bool = False
    """Whether groups of the checkpoint that have not trained are played again: at the fork point of a fork that plays
    or judges them otherwise."""
    notes: list[str] = field(default_factory=list)
    """What a user wants to know: checkpoints that cannot be used, and fields of the config that have changed."""


def find(config: RunConfig, resume: str) -> Resumption | None:
    """The checkpoint to go on from; None where `auto` finds no run to resume.

    `resume`: `latest` or `auto` look into `config.output_dir`; anything else is a run directory or a checkpoint.
    `auto` also begins a run that is not there yet or has no checkpoint. Raises ValueError where there is nothing to
    resume, where no checkpoint is usable, and for a config that does not fit the checkpoint.
    """
    path, chosen = place(config, resume)
    checkpoints = path / "checkpoints"
    candidates = [chosen] if chosen else _candidates(checkpoints)
    if resume == "auto" and (reason := attempts.reason_of_end(RunDir(path))):
        advice = "use --resume latest" if candidates else "start a new run elsewhere: this one has no checkpoint"
        raise ValueError(f"--resume=auto: a restart cannot mend why this run ended: {reason}; mend that, then {advice}")
    if not candidates:
        if resume == "auto":
            return Resumption(path=path, checkpoint=None) if (path / "metrics.jsonl").exists() else None
        begun = RunDir(path).config_file.exists()
        advice = "use --resume auto to begin it again there" if begun else "start the run without it"
        raise ValueError(f"--resume={resume}: there is no checkpoint in {checkpoints}; {advice}")
    notes = []
    for candidate in candidates:
        if problem := checkpoint.problem(candidate):
            notes.append(f"{candidate.name} cannot be used: {problem}")
            continue
        state = checkpoint.read_state(candidate)
        point = fork_point(path)
        if point is not None:
            _require_settings(config, path, point)
        if point is not None and point.checkpoint != candidate.name.removesuffix(checkpoint.REPLACED):
            point = None  # a checkpoint of the fork's own
        changes = {} if point is None else point.changes
        notes += _compared(candidate, config, changes)
        for changed in changes:
            for name in _ADAPTED.get(changed, ()):
                state.pop(name, None)
        return Resumption(
            path=path,
            checkpoint=candidate,
            state=state,
            new_draws=point is not None and point.new_draws,
            plays_again=any(map(changes_rollouts, changes)),
            notes=notes,
        )
    raise ValueError(
        f"--resume={resume}: no checkpoint in {checkpoints} is usable ({'; '.join(notes)}); start a new run in another "
        "output_dir, or put back the file from a copy"
    )


def _require_settings(config: RunConfig, path: Path, point: ForkPoint) -> None:
    """Raises ValueError for a config that has another value of a field that the fork in `path` has changed."""
    values = dict(leaves(json.loads(json.dumps(resolved(settled(config))))))
    for name, (_, forked) in point.changes.items():
        is_source = name.endswith((".source_sha256", ".argument_sha256"))  # a function may have been mended since
        if not is_source and values.get(name) != forked:
            settings = "".join(f" --set {shlex.quote(setting)}" for setting in point.settings)
            command = f"torchtitan-rl fork {shlex.quote(point.parent)} --at {point.step}{settings}"
            raise ValueError(
                f"{name}={values.get(name)!r}: {path} holds a {point.summary()}, with {forked!r}; go on with "
                f"{command} --resume latest --output-dir {shlex.quote(str(path))}"
            )


def place(config: RunConfig, resume: str) -> tuple[Path, Path | None]:
    """(run directory, the checkpoint that `resume` names or None). Raises ValueError as `find` does."""
    if resume in ("latest", "auto"):
        if not config.output_dir:
            raise ValueError(f"--resume={resume}: needs the run's directory; give it as --output-dir")
        return Path(config.output_dir), None
    directory = Path(resume)
    if not directory.is_dir():
        raise ValueError(
            f"--resume={resume}: there is no such directory; give a run directory, one of its checkpoints/step-N, "
            "latest or auto"
        )
    path, chosen = directory, None
    if position(directory.name) and directory.parent.name == "checkpoints":
        path, chosen = directory.parent.parent, directory
    if not (path / "checkpoints").is_dir():
        raise ValueError(f"--resume={resume}: is no run directory, it has no checkpoints; give one, or start a new run")
    if config.output_dir and Path(config.output_dir).absolute() != path.absolute():
        raise ValueError(
            f"--output-dir={config.output_dir}: a run is resumed in its own directory, {path}; leave it out, or start "
            "a new run from the checkpoint's hf directory with --model.assets"
        )
    return path, chosen


def _candidates(checkpoints: Path) -> list[Path]:
    """The checkpoint that `latest` names, then all others, newest first. Where a kill came while a checkpoint took the
    place of another one, the other one still has its files."""
    places = {}
    for path in checkpoints.glob("*-*"):
        name = path.name.removesuffix(checkpoint.REPLACED)
        if place := position(name):
            places[path] = place
    named = {path for path in places if not path.name.endswith(checkpoint.REPLACED)}
    replaced = {path for path in places if path not in named and path.with_suffix("") not in named}
    by_age = sorted(named | replaced, key=places.__getitem__, reverse=True)
    latest = checkpoint.latest(checkpoints)
    name = None if latest is None else latest.name
    return sorted(by_age, key=lambda path: path.name.removesuffix(checkpoint.REPLACED) != name)  # a stable sort


def _compared(saved: Path, config: RunConfig, forked: dict[str, tuple[Any, Any]]) -> list[str]:
    """The harmless changes of the config, as notes. Raises ValueError for the others. `forked` are the changes of a
    fork that goes on from its parent's checkpoint: dotted path -> (the parent's value, the fork's)."""
    current = json.loads(json.dumps(resolved(settled(config))))
    changed = differences(json.loads((saved / checkpoint.RUN_CONFIG).read_text()), current)
    values = dict(leaves(current))
    # A field that the fork changes is compared with the fork's value, not with its parent's.
    changed |= {path: (fork_value, values.get(path)) for path, (_, fork_value) in forked.items()}
    changed = {path: (before, after) for path, (before, after) in changed.items() if before != after}
    texts = {path: f"{path}: was {before!r}, is {after!r}" for path, (before, after) in changed.items()}
    if harmful := [text for path, text in texts.items() if not is_harmless(path)]:
        more = f" and {len(harmful) - 3} more" if len(harmful) > 3 else ""
        raise ValueError(
            f"--resume: the config does not fit {saved}: {'; '.join(harmful[:3])}{more}; set it back, or start a new "
            "run from the checkpoint's weights with --model.assets"
        )
    return [f"changed: {text}" for text in texts.values()]


def open_run(config: RunConfig, resume: str, *, absolute: bool) -> tuple[RunDir, Resumption | None]:
    """The run's directory, locked by this process, and where the run goes on: with `resume` as `find` says, else (None)
    at its beginning in a directory of its own. Raises ValueError as `find` and `RunDir.create` do, and for a directory
    in use by a live run."""
    resumption = find(config, resume) if resume else None
    if resumption is None:
        run_dir = RunDir.create(output_path(config, absolute=absolute))
    else:
        run_dir = RunDir(resumption.path.absolute() if absolute else resumption.path)
    with attempts.locked(run_dir):
        if resumption is None:
            attempts.begin(run_dir, None)
        else:
            _take_over(run_dir, resumption)
        run_dir.write_config(resolved(config))
        begin_record(run_dir)
    return run_dir, resumption


def open_copy(config: RunConfig, saved: Path | None, *, absolute: bool) -> tuple[RunDir, Resumption | None]:
    """A new run directory, locked by this process, for a run that begins with another run's checkpoint `saved` (None:
    at the beginning). Raises ValueError as `RunDir.create` does."""
    run_dir, resumption = RunDir.create(output_path(config, absolute=absolute)), None
    with attempts.locked(run_dir):
        if saved is None:
            attempts.begin(run_dir, None)
        else:
            state = checkpoint.read_state(saved)
            resumption = Resumption(path=run_dir.path, checkpoint=saved, state=state)
            attempts.begin(run_dir, str(saved), state.get("phase", ""), state.get("phase_step", 0))
        run_dir.write_config(resolved(config))
    return run_dir, resumption


def _take_over(run_dir: RunDir, resumption: Resumption) -> None:
    """Makes a run's directory ready for another attempt: metrics and checkpoints after the one where it goes on are put
    aside, checkpoints that were being written are deleted. Raises ValueError, with nothing changed, where the metrics
    do not reach as far as the checkpoint."""
    state, metrics_bytes = resumption.state, resumption.state.get("metrics_bytes", 0)
    attempts.require_metrics(run_dir, metrics_bytes)
    for half in run_dir.checkpoints.glob("*.writing"):
        checkpoint.remove(half)
    for replaced in run_dir.checkpoints.glob(f"*{checkpoint.REPLACED}"):
        restored = checkpoint.put_back(replaced)
        if resumption.checkpoint is not None and replaced.name == resumption.checkpoint.name:
            resumption.checkpoint = resumption.checkpoint.with_name(restored.name)
    if resumption.checkpoint is not None and not checkpoint.is_complete(resumption.checkpoint):
        checkpoint.mark(resumption.checkpoint)
    attempts.forget_end(run_dir)
    run_dir.note_checksums()  # of what an attempt wrote that was killed
    name = resumption.checkpoint.name if resumption.checkpoint else None
    number = attempts.begin(run_dir, name, state.get("phase", ""), state.get("phase_step", 0))
    cut = attempts.cut_metrics(run_dir, metrics_bytes, number)
    where = f"at {name}" if name else "at the beginning: there is no checkpoint yet"
    resumption.notes.append(f"attempt {number} goes on {where}; {cut} lines of metrics after it are put aside")
    if name is not None and (later := _put_aside_after(run_dir.checkpoints / name, number)):
        resumption.notes.append(
            f"checkpoints after {name} belong to what is taken again, and are put aside: {', '.join(later)}"
        )


def _put_aside_after(saved: Path, attempt: int) -> list[str]:
    """Makes `saved` the newest checkpoint of its run: later ones get names that no checkpoint of a run has. Returns
    these names."""
    checkpoint.point_to(saved)
    here = position(saved.name)
    aside = []
    for path in sorted(saved.parent.glob("*-*")):
        if (place := position(path.name)) and place > here:
            path = path.rename(path.with_name(f"{path.name}.before-attempt-{attempt}"))
            aside.append(path.name)
    return aside


def state_of(resumption: Resumption) -> RunState:
    """The controller's state in the checkpoint."""
    extra = ("random", "metrics_bytes")
    return RunState(**{name: value for name, value in resumption.state.items() if name not in extra})


async def restore(
    resumption: Resumption,
    config: RunConfig,
    state: RunState,
    roles: dict[str, TrainingClient],
    weights: PolicyWeights,
    draws: Draws,
) -> None:
    """Loads weights, optimizers, snapshot, position in the data and random states of a checkpoint, and publishes the
    policy's weights."""
    saved = resumption.checkpoint
    await asyncio.gather(
        *(
            roles[role].load_checkpoint(
                saved / part, policy_version=state.policy_version, optimizer=role != "reference"
            )
            for role, part in checkpointed_roles(config).items()
        )
    )
    if resumption.new_draws:
        draws.next_slot = state.draws["next_slot"]
    else:
        draws.load_state_dict(state.draws)
    await weights.publish()
    if state.teacher_version is not None:
        await weights.load_teacher(state.teacher_version, checkpoint.teacher_file(saved))
    set_random_states(resumption.state["random"])

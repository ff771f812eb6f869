"""An attempt at a run that was recorded with its schedule, for a replay: where it began, and what its clock decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import Schedules, engine_files, read_environment, schedule_of
from torchtitan_rl.weights import checkpoint

__all__ = ["RecordedAttempt", "recorded_attempt"]

_ENDS = ("trained", "filtered", "failed")


@dataclass(kw_only=True, slots=True)
class RecordedAttempt:
    """What a replay follows. It begins where the attempt began, or at a later checkpoint."""

    run: Path
    number: int
    """Of the attempt, from 1."""
    first: int
    """The step that the replay begins after."""
    last: int
    """The last step that it trains."""
    checkpoint: Path | None
    """What it begins from; None: the beginning of the run."""
    num_requests: int
    """The requests of the attempt that were sent before the checkpoint; 0 where the attempt began there."""
    num_engines: int
    """The replicas of the attempt, those that took a lost one's place included."""
    environment: dict[str, Any]
    """What `record.schedule.environment` said at the time."""
    batches: list[list[int]] = field(default_factory=list)
    """The slots of each batch that it trains, in order."""

    def schedules(self, directory: Path, patience_s: float | None) -> Schedules:
        """What the engines of the replay follow; they record their own schedules in `directory`."""
        files = engine_files(schedule_of(self.run, self.number))
        return Schedules(
            directory=str(directory),
            followed={f"generator-{i}": str(file) for i, file in enumerate(files)},
            after_request=self.num_requests,
            patience_s=patience_s,
        )


def recorded_attempt(run: Path, *, first: int | None, last: int | None) -> RecordedAttempt:
    """The attempt that trained step `last` (None: the run's last step), from the checkpoint of step `first` on (None:
    from where the attempt began). Raises ValueError for a run without a schedule, for steps that it does not have, and
    for a checkpoint that is missing or damaged."""
    run_dir = RunDir(run)
    if not (run / "metrics.jsonl").exists():
        raise ValueError(
            f"run={str(run)!r}: is no run directory, it has no metrics.jsonl; give one, such as runs/first"
        )
    steps = [line["step"] for line in run_dir.read_metrics() if line["phase"] == "reinforcement"]
    if not steps:
        raise ValueError(f"run={str(run)!r}: has trained no batch; there is nothing to replay")
    to = steps[-1] if last is None else last
    if to not in steps:
        raise ValueError(f"--to={to}: no batch of the run ended at that step; give one of {_listed(steps)}")
    began = [record for record in attempts.attempts(run_dir) if _step(record) < to]
    record = began[-1]
    number, begins = record["attempt"], _step(record)
    engines = engine_files(schedule_of(run, number))
    if not engines:
        raise ValueError(
            f"run={str(run)!r}: attempt {number} has no schedule; runs record one from this version on, unless "
            "record.schedule=False"
        )
    start = begins if first is None else first
    if start != begins and start not in steps or not begins <= start < to:
        raise ValueError(
            f"--from={start}: step {to} was trained by attempt {number}, which began after step {begins}; give a step "
            f"with a checkpoint from {begins} to {to - 1}"
        )
    if start == begins:
        name, num_requests = record["resumed_from"], 0
        path = None if name is None else run / "checkpoints" / name
    elif lag := Run(run_dir).config().get("algorithm", {}).get("max_policy_lag"):
        raise ValueError(
            f"--from={start}: with algorithm.max_policy_lag={lag} requests are under way at a checkpoint, which "
            f"older weights have begun; a replay begins where attempt {number} began, after step {begins}"
        )
    else:
        path, num_requests = run_dir.checkpoint_path(start), None
    if path is not None and (problem := "is missing" if not path.is_dir() else checkpoint.problem(path)):
        raise ValueError(f"checkpoint={str(path)!r}: {problem}; replay from another one, or put it back from a copy")
    if num_requests is None:
        state = checkpoint.read_state(path)
        num_requests = state.get("num_requests", 0)
        if not num_requests:
            raise ValueError(f"checkpoint={str(path)!r}: does not say which requests came before it; leave --from out")
    return RecordedAttempt(
        run=run,
        number=number,
        first=start,
        last=to,
        checkpoint=path,
        num_requests=num_requests,
        num_engines=len(engines),
        environment=read_environment(schedule_of(run, number)),
        batches=_batches(run_dir, number, start),
    )


def _step(attempt: dict[str, Any]) -> int:
    """The steps of the reinforcement phase before an attempt."""
    return attempt["step"] if attempt["phase"] == "reinforcement" else 0


def _batches(run_dir: RunDir, attempt: int, first: int) -> list[list[int]]:
    """The slots of each batch that an attempt trained after step `first`."""
    slots: dict[int, set[int]] = {}
    for record in run_dir.tables["ledger"].read():
        if record["attempt"] == attempt and record["event"] in _ENDS and record["step"] > first:
            slots.setdefault(record["step"], set()).add(int(record["draw"].split("/")[0]))
    return [sorted(slots[step]) for step in sorted(slots)]


def _listed(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 8 else ", ".join(map(str, steps))

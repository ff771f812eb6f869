"""An attempt at a run that was recorded with its schedule, for a replay: where it began, and what its clock decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.dispatch.recorded_answers import RecordedAnswers
from torchtitan_rl.health.run_reader import Run
from torchtitan_rl.model.decoding import schedules_ahead
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import (
    Schedules,
    company,
    engine_files,
    read_environment,
    read_schedule,
    schedule_of,
    since_load,
)
from torchtitan_rl.record.schemas import ENDS
from torchtitan_rl.weights import checkpoint

if TYPE_CHECKING:
    from torchtitan_rl.config.run import RunConfig

__all__ = ["RecordedAttempt", "check_company", "recorded_attempt"]


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
    served: int | None = None
    """The version that the engines had loaded at the checkpoint, where requests were under way then: the replay follows
    their schedules from that load on. None: no request was under way."""
    answers: RecordedAnswers | None = None
    """Of the requests that had begun before that load."""
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
            after_load=self.served,
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
    began = [record for record in attempts.attempts(run_dir) if attempts.steps_before(record) < to]
    record = began[-1]
    number, begins = record["attempt"], attempts.steps_before(record)
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
    else:
        path, num_requests = run_dir.checkpoint_path(start), None
    if path is not None and (problem := "is missing" if not path.is_dir() else checkpoint.problem(path)):
        raise ValueError(f"checkpoint={str(path)!r}: {problem}; replay from another one, or put it back from a copy")
    environment = read_environment(schedule_of(run, number))
    if environment.get("after_load") is not None:
        raise ValueError(
            f"run={str(run)!r}: is a replay that began at a checkpoint with requests under way, and has no schedule of "
            "these; replay the run that it follows"
        )
    served, answers, slots = None, None, _slots(run_dir, number, start)
    lag = Run(run_dir).config().get("algorithm", {}).get("max_policy_lag", 0)
    if num_requests is None and lag:
        num_requests, served = 0, checkpoint.read_state(path)["policy_version"]
        if len(slots) < lag and max(slots) < Run(run_dir).config()["controller"]["num_steps"]:
            raise ValueError(
                f"--from={start}: what was under way then trained in the {lag} batches after it, of which attempt "
                f"{number} has {len(slots)}; give an earlier checkpoint"
            )
        answers = _answers(run_dir, number, served, engines, steps=[start, *slots][: lag + 1])
    elif num_requests is None:
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
        served=served,
        answers=answers,
        environment=environment,
        batches=list(slots.values()),
    )


def check_company(config: RunConfig, first: int) -> None:
    """Raises ValueError for a config whose engines cannot go on from a checkpoint with requests under way."""
    shape = resolve_shape(config.model)
    setting = f"--from={first}: with algorithm.max_policy_lag above 0 and "
    problem = ""
    if config.generator.on_update == "recompute":
        problem = "generator.on_update='recompute' the new weights read all tokens of requests under way again"
    elif config.generator.max_adapters:
        problem = "generator.max_adapters the schedule does not say whose adapters requests under way had"
    elif config.record.explain_mismatch_every:
        problem = "record.explain_mismatch_every the generators score rollouts, and scores are not recorded"
    elif config.algorithm.asks_teacher:
        problem = "self-distillation the generators score rollouts, and scores are not recorded"
    elif config.algorithm.greedy_baseline:
        problem = "algorithm.greedy_baseline there are greedy completions, which are not recorded"
    elif shape.experts is not None:
        problem = "a mixture of experts each of them gets the tokens of all rows that choose it"
    elif shape.state_sizes:
        problem = "layers that keep a state no request begins in its middle"
    elif schedules_ahead(config.generator, shape):
        problem = "generator.async_scheduling a request that ends has a row of the next step too"
    if problem:
        raise ValueError(
            f"{setting}{problem}, which only a replay from the attempt's beginning repeats; leave --from out"
        )


def _slots(run_dir: RunDir, attempt: int, first: int) -> dict[int, list[int]]:
    """Step -> the slots of the batch that an attempt trained then, in order, after step `first`."""
    slots: dict[int, set[int]] = {}
    for record in run_dir.tables["ledger"].read():
        if record["attempt"] == attempt and record["event"] in ENDS and record["step"] > first:
            slots.setdefault(record["step"], set()).add(int(record["draw"].split("/")[0]))
    return {step: sorted(slots[step]) for step in sorted(slots)}


def _answers(run_dir: RunDir, attempt: int, served: int, engines: list[Path], *, steps: list[int]) -> RecordedAnswers:
    """The recorded answers to the requests that had begun before the engines loaded version `served`. `steps` are that
    of the checkpoint, and those of the batches in which the requests trained. Raises ValueError where the record does
    not have them, and where nothing can take the place of a request that was under way."""
    setting = f"--from={steps[0]}: "
    schedules = [list(read_schedule(file)) for file in engines]
    if any(sum(entry.version == served for entry in entries) > 1 for entries in schedules):
        raise ValueError(
            f"{setting}version {served} was loaded twice, as a batch beside the checkpoint has changed nothing; give "
            "another checkpoint"
        )
    followed = [since_load(entries, served) for entries in schedules]
    for entries in filter(None, followed):
        if entries[0].under_way is None:
            raise ValueError(
                f"{setting}the schedule does not say which requests were under way; runs record it from this version on"
            )
        try:
            company(entries)
        except ValueError as problem:
            raise ValueError(f"{setting}{problem}; give another checkpoint, or leave --from out") from problem
    if not any(followed):
        raise ValueError(f"{setting}no engine has loaded version {served}; leave --from out")
    rollouts = []
    for record in run_dir.tables["rollouts"].read():
        if record["attempt"] == attempt and record["step"] in steps[1:]:
            if record.get("turns") is None:
                raise ValueError(
                    f"{setting}requests were under way, and controller.record_tokens=False has kept no tokens of them; "
                    "leave --from out"
                )
            rollouts.append(record)
    return RecordedAnswers(followed, rollouts)


def _listed(steps: list[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 8 else ", ".join(map(str, steps))

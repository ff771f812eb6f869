"""What came of the runs of a sweep, read from their directories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.record import attempts
from torchtitan_rl.record.curves import final_evaluations
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.sweep.arms import Arm
from torchtitan_rl.train.run_record import read_record

__all__ = ["RunResult", "failure_of", "forget_failure", "note_failure", "result_of", "smallest_evaluations"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
    """The last evaluations of a run that has come to its end, on its own tasks."""

    validation: float
    """Greedy accuracy."""
    test: float
    num_tasks: int
    """Validation tasks."""
    num_test_tasks: int


def result_of(directory: Path, config: RunConfig) -> RunResult | None:
    """None for a run that has not come to its end. `config` says which evaluations are on other tasks."""
    record = read_record(directory)
    if record is None or not record.digests:
        return None
    lines = final_evaluations(RunDir(directory).read_metrics())
    own = {line["eval/split"]: line for line in lines if line["eval/name"] not in config.controller.eval_sets}
    return RunResult(
        validation=own["validation"]["eval/accuracy"],
        test=own["test"]["eval/accuracy"],
        num_tasks=own["validation"]["eval/num_tasks"],
        num_test_tasks=own["test"]["eval/num_tasks"],
    )


def note_failure(directory: Path, reason: str) -> None:
    """Writes beside the directory of a run why it has failed, for the other processes of the sweep."""
    _failure_file(directory).parent.mkdir(exist_ok=True)
    _failure_file(directory).write_text(reason, encoding="utf-8")


def failure_of(directory: Path) -> str:
    """Why a run has failed; empty where it has not, or is tried again."""
    try:
        return _failure_file(directory).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def forget_failure(directory: Path) -> None:
    """Lets a run that has failed be tried again: also one whose own directory says that a restart cannot mend it, which
    `--resume auto` would refuse."""
    _failure_file(directory).unlink(missing_ok=True)
    attempts.forget_end(RunDir(directory))


def _failure_file(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.failed")


def smallest_evaluations(results: Mapping[Arm, Mapping[int, RunResult]]) -> tuple[int, int]:
    """The fewest validation and test tasks that a run was evaluated on; 1 without runs. `results` are by arm and
    seed."""
    every = [result for arm_results in results.values() for result in arm_results.values()]
    fewest = min((result.num_tasks for result in every), default=1)
    return fewest, min((result.num_test_tasks for result in every), default=1)

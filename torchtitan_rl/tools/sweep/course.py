"""The course of a sweep: which run comes next. Its state is the directories of its runs and nothing else, so a sweep
that was killed goes on by itself: runs that have come to their end are read, the one that was cut off is resumed."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_rl.launch.liveness.restarts import Outcome
from torchtitan_rl.record.console.notices import say
from torchtitan_rl.tools.sweep.arm_table import ArmRow, write_table
from torchtitan_rl.tools.sweep.arms import Arm
from torchtitan_rl.tools.sweep.results import RunResult, forget_failure, note_failure, result_of
from torchtitan_rl.tools.sweep.standing import fork_point_is_there, nothing_to_fork, read_standing, table_of
from torchtitan_rl.tools.sweep.sweep_plan import Plan
from torchtitan_rl.types.ends import PREEMPTED_STATUS

__all__ = ["Interrupted", "TrainParent", "TrainFork", "carry_out", "log_file"]

TrainParent = Callable[[int, bool], Outcome]
"""Trains the parent of a seed, the second argument: to its end, or else to the fork point."""
TrainFork = Callable[[Arm, int], Outcome]
"""Trains the fork of an arm from the parent of a seed."""
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
_REQUESTED = (PREEMPTED_STATUS, *(128 + number for number in _SIGNALS))
"""Exit statuses of a run that somebody, or its time limit, asked to end: with a checkpoint, or by a signal."""


class Interrupted(Exception):
    """A run, or the sweep while a run trained, was asked to end, and the sweep ends with it. The argument is the exit
    status of the sweep."""


def carry_out(plan: Plan, seeds: Sequence[int], train_parent: TrainParent, train_fork: TrainFork) -> list[ArmRow]:
    """Trains what is missing of `seeds`, one after the other, and returns the table, which is also written after each
    seed. Other processes may train the other seeds meanwhile: the table has what they have done, and an arm that has
    failed, or was stopped, in the seeds in front of this one is not trained.

    A run that fails is noted in the table; where it had failed before this call, it is tried again. Raises Interrupted
    where a run was asked to end.
    """
    known: dict[Path, RunResult] = {}
    for seed in seeds:
        for run in {plan.parent(seed), *(plan.run(arm, seed) for arm in plan.arms)}:
            forget_failure(run)
    for seed in seeds:
        ends = read_standing(plan, known, before=seed).ends
        active = [arm for arm in plan.arms if arm not in ends]
        if not active:
            break
        _train_parent(plan, seed, any(arm.is_base for arm in active), train_parent)
        for arm in active:
            if not arm.is_base and fork_point_is_there(plan, seed):
                _train_fork(plan, known, arm, seed, train_fork)
        _write_table(plan, known)
    return _write_table(plan, known)


def _train_parent(plan: Plan, seed: int, whole: bool, train_parent: TrainParent) -> None:
    """Trains the parent of a seed, unless it has come as far already, and notes why it did not come so far. One that
    has gone past the fork point without its checkpoint has come as far as it can: `standing` says so in the table."""

    def is_over() -> bool:
        if result_of(plan.parent(seed), plan.config) is not None:
            return True
        return not whole and (fork_point_is_there(plan, seed) or nothing_to_fork(plan, seed) != "")

    if is_over():
        return
    say(f"seed {seed}: {plan.base.name if whole else 'the parent of the forks'}", event="sweep")
    outcome = train_parent(seed, whole)
    _end_where_asked(outcome)
    if not is_over():
        note_failure(plan.parent(seed), _problem(outcome, plan.parent(seed)))


def _train_fork(plan: Plan, known: dict[Path, RunResult], arm: Arm, seed: int, train_fork: TrainFork) -> None:
    """Trains the run of an arm and a seed, unless it is there or the arm has been stopped by now, and notes why it
    failed."""
    run = plan.run(arm, seed)
    if result_of(run, plan.config) is not None or arm in read_standing(plan, known, before=seed).ends:
        return
    say(f"seed {seed}: {arm.name}", event="sweep")
    outcome = train_fork(arm, seed)
    _end_where_asked(outcome)
    if result_of(run, plan.config) is None:
        note_failure(run, _problem(outcome, run))


def _end_where_asked(outcome: Outcome) -> None:
    """Raises Interrupted where a signal asked for the end while a run trained. The run may have come to its end, or
    failed, all the same: the next call reads its result, or tries it again."""
    if outcome.asked_by:
        signal_status = PREEMPTED_STATUS if outcome.asked_by == signal.SIGTERM else 128 + outcome.asked_by
        raise Interrupted(outcome.status if outcome.status in _REQUESTED else signal_status)


def _write_table(plan: Plan, known: dict[Path, RunResult]) -> list[ArmRow]:
    """Writes the table as it is now and returns it. Written again where a run has ended meanwhile: its process may have
    written its table before this one, so that the last table on disk would lack the run."""
    table = table_of(plan, known)
    while True:
        write_table(plan.directory, table, len(plan.seeds), keep_all=plan.keep_all)
        now = table_of(plan, known)
        if now == table:
            return table
        table = now


def _problem(outcome: Outcome, directory: Path) -> str:
    """Why a run has not come to its end, from what its last attempt printed. Raises Interrupted where it was asked to
    end."""
    if outcome.status in _REQUESTED:
        raise Interrupted(outcome.status)
    log = log_file(directory)
    printed = log.read_bytes()[outcome.printed_from :] if log.exists() else b""
    lines = printed.decode("utf-8", "replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return f"{errors[-1]} ({log})" if errors else f"it ended with status {outcome.status}; see {log}"


def log_file(directory: Path) -> Path:
    """The file that has what the command of a run printed."""
    return directory.with_name(f"{directory.name}.txt")

"""The course of a sweep: which run comes next. Its state is the directories of its runs and nothing else, so a sweep
that was killed goes on by itself: runs that have come to their end are read, the one that was cut off is resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchtitan_rl.record.console.notices import say
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.sweep.arm_table import Row, rows, write_table
from torchtitan_rl.tools.sweep.arms import Arm
from torchtitan_rl.tools.sweep.results import Result, result_of, smallest_evaluations
from torchtitan_rl.tools.sweep.stop_rule import stopped
from torchtitan_rl.tools.sweep.sweep_plan import Plan
from torchtitan_rl.weights import checkpoint

__all__ = ["Interrupted", "TrainParent", "TrainFork", "carry_out", "log_file"]

TrainParent = Callable[[int, bool], int]
"""Trains the parent of a seed, the second argument: to its end, or else to the fork point. Returns an exit status."""
TrainFork = Callable[[Arm, int], int]
"""Trains the fork of an arm from the parent of a seed. Returns an exit status."""
_REQUESTED = (75, 130, 143)
"""Exit statuses of a run that somebody, or its time limit, asked to end: with a checkpoint, by Ctrl-C, by SIGTERM."""


class Interrupted(Exception):
    """A run was asked to end, and the sweep ends with it. The argument is the run's exit status."""


def carry_out(plan: Plan, train_parent: TrainParent, train_fork: TrainFork) -> list[Row]:
    """Trains what is missing, seed by seed, and returns the table, which is also written after each seed. Raises
    Interrupted where a run was asked to end; a run that fails is noted in the table."""
    results: dict[Arm, dict[int, Result]] = {arm: {} for arm in plan.arms}
    ends: dict[Arm, str] = {}
    """Arms that are not continued -> why."""
    orphans: dict[int, str] = {}
    """Seeds whose parent has no checkpoint to fork -> why."""

    def table() -> list[Row]:
        lost = "".join(f"; no parent for seed {seed}: {problem}" for seed, problem in orphans.items())
        states = {}
        for arm in plan.arms:
            states[arm] = ends.get(arm) or ("done" if len(results[arm]) == len(plan.seeds) else f"seeds missing{lost}")
        return rows(plan.arms, plan.base, results, states)

    for seed in plan.seeds:
        active = [arm for arm in plan.arms if arm not in ends]
        if not active:
            break
        parent_problem = _train_parent(plan, seed, any(arm.is_base for arm in active), train_parent)
        for arm in active:
            result = result_of(plan.run(arm, seed), plan.config)
            problem = ""
            if result is None and arm.is_base:
                problem = parent_problem
            elif result is None and not _fork_point_is_there(plan, seed):
                orphans[seed] = parent_problem
                continue
            elif result is None:
                say(f"seed {seed}: {arm.name}", event="sweep")
                status = train_fork(arm, seed)
                result = result_of(plan.run(arm, seed), plan.config)
                problem = "" if result is not None else _problem(status, plan.run(arm, seed))
            if result is not None:
                results[arm][seed] = result
            else:
                ends[arm] = f"failed at seed {seed}: {problem}"
        if not plan.keep_all:
            ends |= _worse(plan, results, ends, seed)
        write_table(plan.directory, table(), len(plan.seeds))
    return table()


def _train_parent(plan: Plan, seed: int, whole: bool, train_parent: TrainParent) -> str:
    """Trains the parent of a seed, unless it has come as far already. Returns why it has not; empty where it has."""
    if result_of(plan.parent(seed), plan.config) is not None or not whole and _fork_point_is_there(plan, seed):
        return ""
    say(f"seed {seed}: {plan.base.name if whole else 'the parent of the forks'}", event="sweep")
    status = train_parent(seed, whole)
    if result_of(plan.parent(seed), plan.config) is not None or not whole and _fork_point_is_there(plan, seed):
        return ""
    return _problem(status, plan.parent(seed))


def _fork_point_is_there(plan: Plan, seed: int) -> bool:
    saved = RunDir(plan.parent(seed)).checkpoint_path(plan.at)
    return saved.is_dir() and checkpoint.is_complete(saved)


def _problem(status: int, directory: Path) -> str:
    """Why a run has not come to its end, from what it printed last. Raises Interrupted where it was asked to end."""
    if status in _REQUESTED:
        raise Interrupted(status)
    log = log_file(directory)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return f"{errors[-1]} ({log})" if errors else f"it ended with status {status}; see {log}"


def log_file(directory: Path) -> Path:
    """The file that has what the command of a run printed."""
    return directory.with_name(f"{directory.name}.txt")


def _worse(plan: Plan, results: dict[Arm, dict[int, Result]], ends: dict[Arm, str], seed: int) -> dict[Arm, str]:
    """The arms that go on and are worse than the best of them with confidence -> the state of their rows."""
    active = {arm.name: arm for arm in plan.arms if arm not in ends}
    num_tasks, _ = smallest_evaluations(results)
    accuracies = {name: {s: result.validation for s, result in results[arm].items()} for name, arm in active.items()}
    stops = stopped(accuracies, num_arms=len(plan.arms), num_seeds=len(plan.seeds), num_tasks=num_tasks)
    if seed == plan.seeds[-1]:
        return {}
    return {active[name]: f"stopped after seed {seed}: {stop.summary()}" for name, stop in stops.items()}

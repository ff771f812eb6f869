"""How far a sweep has come, read from the directories of its runs. Processes that share a sweep agree about it: they
read the same directories."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.tools.sweep.arm_table import ArmRow, rows
from torchtitan_rl.tools.sweep.arms import Arm
from torchtitan_rl.tools.sweep.results import RunResult, failure_of, result_of, smallest_evaluations
from torchtitan_rl.tools.sweep.stop_rule import stopped
from torchtitan_rl.tools.sweep.sweep_plan import Plan
from torchtitan_rl.train.retention import complete, position
from torchtitan_rl.weights import checkpoint

__all__ = ["Standing", "fork_point_is_there", "nothing_to_fork", "read_standing", "table_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What the seeds of a sweep have shown so far, taken in their order."""

    results: dict[Arm, dict[int, RunResult]]
    """By arm and seed, up to the seed at which the arm ended."""
    ends: dict[Arm, str]
    """Arms that are not continued -> why."""
    orphans: dict[int, str]
    """Seeds whose parent has no checkpoint to fork -> why."""


def read_standing(plan: Plan, known: dict[Path, RunResult], *, before: int | None = None) -> Standing:
    """What all seeds have shown, or those in front of `before`. `known` are results that were read already, by the
    directory of the run; it gets the new ones."""
    results: dict[Arm, dict[int, RunResult]] = {arm: {} for arm in plan.arms}
    ends: dict[Arm, str] = {}
    orphans: dict[int, str] = {}
    is_over = True  # arms are compared after seeds that are over, as if seeds had come one after the other
    for seed in plan.seeds:
        if seed == before:
            break
        for arm in [arm for arm in plan.arms if arm not in ends]:
            result = _result(plan, known, plan.run(arm, seed))
            if result is not None:
                results[arm][seed] = result
            elif reason := failure_of(plan.run(arm, seed)):
                ends[arm] = f"failed at seed {seed}: {reason}"
            elif not arm.is_base and (reason := nothing_to_fork(plan, seed)):
                orphans[seed] = reason
            else:
                is_over = False
        if is_over and not plan.keep_all and seed != plan.seeds[-1]:
            ends |= _worse(plan, results, ends, seed)
    return Standing(results=results, ends=ends, orphans=orphans)


def _result(plan: Plan, known: dict[Path, RunResult], run: Path) -> RunResult | None:
    if run not in known and (result := result_of(run, plan.config)) is not None:
        known[run] = result
    return known.get(run)


def fork_point_is_there(plan: Plan, seed: int) -> bool:
    saved = RunDir(plan.parent(seed)).checkpoint_path(plan.at)
    return saved.is_dir() and checkpoint.is_complete(saved)


def nothing_to_fork(plan: Plan, seed: int) -> str:
    """Why the forks of a seed have no checkpoint to begin from; empty where they have one, or it may still come."""
    parent = plan.parent(seed)
    if fork_point_is_there(plan, seed):
        return ""
    if reason := failure_of(parent):
        return reason
    names = [path.name for path in complete(RunDir(parent).checkpoints)]
    steps = [position(name)[1] for name in names if name.startswith("step-")]
    if result_of(parent, plan.config) is None and max(steps, default=-1) <= plan.at:
        return ""
    there = f"those after {', '.join(map(str, steps))}" if steps else "none of reinforcement"
    return (
        f"{parent} has no checkpoint after step {plan.at} and will write none, it has {there}; begin a sweep in "
        "another directory with an --at that its parents have, or remove the parent's directory to train it again"
    )


def _worse(plan: Plan, results: dict[Arm, dict[int, RunResult]], ends: dict[Arm, str], seed: int) -> dict[Arm, str]:
    """The arms that go on and are worse than the best of them with confidence -> the state of their rows."""
    active = {arm.name: arm for arm in plan.arms if arm not in ends}
    num_tasks, _ = smallest_evaluations(results)
    accuracies = {name: {s: result.validation for s, result in results[arm].items()} for name, arm in active.items()}
    stops = stopped(accuracies, num_arms=len(plan.arms), num_seeds=len(plan.seeds), num_tasks=num_tasks)
    return {active[name]: f"stopped after seed {seed}: {stop.summary()}" for name, stop in stops.items()}


def table_of(plan: Plan, known: dict[Path, RunResult]) -> list[ArmRow]:
    """The table as the directories have it now; `known` as in `read_standing`."""
    standing = read_standing(plan, known)
    lost = "".join(f"; no parent for seed {seed}: {problem}" for seed, problem in standing.orphans.items())
    states = {}
    for arm in plan.arms:
        is_done = len(standing.results[arm]) == len(plan.seeds)
        states[arm] = standing.ends.get(arm) or ("done" if is_done else f"seeds missing{lost}")
    return rows(plan.arms, plan.base, standing.results, states)

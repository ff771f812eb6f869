"""The verb `audit`: checks a run's records. No finished file is damaged, every draw ends once, and ledger, metrics,
rollouts and checkpoints agree."""

from __future__ import annotations

import argparse
import math
from collections import Counter, defaultdict
from typing import Any

from torchtitan_rl.health.whereabouts import whereabouts
from torchtitan_rl.record.attempts import attempts, read_ledger, read_rollouts
from torchtitan_rl.record.json_lines import parsed
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schemas import ENDS
from torchtitan_rl.tools.selection import opened
from torchtitan_rl.train.retention import complete

__all__ = ["add_arguments", "audit", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory")


def run(args: argparse.Namespace) -> int:
    """Prints how a run's draws ended, and problems. Returns 1 where there are problems."""
    run_dir = RunDir(args.run)
    if not run_dir.tables["ledger"]:
        raise ValueError(f"run={args.run!r}: has no ledger; give a run directory that has begun reinforcement")
    goes_on = whereabouts(opened(args.run)).state == "running"
    counts, problems = audit(run_dir, goes_on=goes_on)
    print(", ".join(f"{name} {number}" for name, number in counts.items()))
    for problem in problems:
        print(f"problem: {problem}")
    print("the records agree" if not problems else f"{len(problems)} problems")
    return 1 if problems else 0


def audit(run_dir: RunDir, *, goes_on: bool = False) -> tuple[dict[str, int], list[str]]:
    """(counts, problems) of a run that has ended or was killed; with `goes_on` of one that writes meanwhile. No
    problems: an empty list.

    Counts: `attempts`, `steps`, `rollouts`, the draws `admitted`, how many of them were `trained`, `filtered`,
    `failed`, and `cut_short`: admitted, and the run ended before they did.
    """
    records = list(read_ledger(run_dir))
    admitted = Counter(record["draw"] for record in records if record["event"] == "admitted")
    ended: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        if record["event"] in ENDS:
            ended[record["draw"]].append(record)
    newest: float = math.inf
    if goes_on:  # what is read later may have more than the ledger had, and of its newest step not all yet
        trained = (end["step"] for draw_ends in ended.values() for end in draw_ends if end["event"] == "trained")
        newest = max(trained, default=0)
    steps = [line["step"] for line in run_dir.read_metrics() if line["phase"] == "reinforcement"]
    steps = [step for step in steps if step <= newest]
    last = max(steps, default=0)
    problems = run_dir.checksums.problems()
    problems += [f"draw {draw}: was admitted {count} times" for draw, count in admitted.items() if count > 1]
    problems += [f"draw {draw}: ended {len(ends)} times" for draw, ends in ended.items() if len(ends) > 1]
    problems += [f"draw {draw}: ended without having been admitted" for draw in ended if draw not in admitted]
    open_draws = [r for r in records if r["event"] == "admitted" and r["draw"] not in ended]
    problems += [
        f"draw {r['draw']}: was admitted after step {r['step']} and never ended, though step {last} was reached"
        for r in open_draws
        if r["step"] < last
    ]
    slots = sorted(int(draw.split("/")[0]) for draw in admitted if draw.endswith("/0"))
    if slots != list(range(len(slots))):
        problems.append(f"slots: {len(slots)} were filled, and they are not 0 to {len(slots) - 1}")
    rollouts, rollout_problems = _of_rollouts(run_dir, ended, newest)
    problems += _of_steps(steps, ended) + rollout_problems + _of_checkpoints(run_dir, records, newest)
    ends = Counter(draw_ends[-1]["event"] for draw_ends in ended.values())
    counts = {"attempts": len(attempts(run_dir)), "steps": last, "rollouts": rollouts, "admitted": len(admitted)}
    return counts | {event: ends[event] for event in ENDS} | {"cut_short": len(open_draws)}, problems


def _of_steps(steps: list[int], ended: dict[str, list[dict[str, Any]]]) -> list[str]:
    problems = [f"metrics: step {step} has {count} lines" for step, count in Counter(steps).items() if count > 1]
    trained = {record["step"] for draw_ends in ended.values() for record in draw_ends if record["event"] == "trained"}
    problems += [f"step {step}: has a line of metrics, and no draw was trained" for step in sorted({*steps} - trained)]
    return problems + [f"step {step}: trained draws, and has no line of metrics" for step in sorted(trained - {*steps})]


def _of_rollouts(run_dir: RunDir, ended: dict[str, list[dict[str, Any]]], newest: float) -> tuple[int, list[str]]:
    """(number of rollouts, problems). Rollouts of the newest step may be missing still, later ones are not judged."""
    recorded: dict[str, set[int]] = defaultdict(set)
    rollouts = list(read_rollouts(run_dir, ("step", "attempt", "draw")))
    for record in rollouts:
        if record["draw"] and record["step"] <= newest:  # a hook's own rollouts may name none
            recorded[record["draw"]].add(record["step"])
    problems = []
    for draw, draw_ends in ended.items():
        if draw_ends[-1]["event"] == "failed" or draw_ends[-1]["step"] == newest and draw not in recorded:
            continue
        if recorded.get(draw, set()) != {draw_ends[-1]["step"]}:
            steps_of_rollouts = sorted(recorded.get(draw, ()))
            problems.append(
                f"draw {draw}: ended at step {draw_ends[-1]['step']}, its rollouts are recorded at {steps_of_rollouts}"
            )
    problems += [f"draw {draw}: has rollouts, and no end" for draw in recorded if draw not in ended]
    return len(rollouts), problems


def _of_checkpoints(run_dir: RunDir, records: list[dict[str, Any]], newest: float) -> list[str]:
    ended, problems = {r["draw"]: r["step"] for r in records if r["event"] in ENDS}, []
    for path in complete(run_dir.checkpoints):
        state = parsed((path / "state.json").read_text())
        if state["step"] > newest:
            continue
        admitted = {r["draw"]: r["step"] for r in records if r["event"] == "admitted"}
        before = [draw for draw, step in admitted.items() if ended.get(draw, step + 1) <= state["step"]]
        slots = sum(draw.endswith("/0") for draw in before)
        if state["draws"] and (trained := _num_trained(state["draws"])) != slots:
            problems.append(f"{path.name}: goes on with slot {trained}, {slots} were filled before")
    return problems


def _num_trained(draws: dict[str, Any]) -> int:
    """The slots that had trained, by a checkpoint's state of the draws: all before the next one, or with
    `batch_order="finished"` all that were admitted but those in flight."""
    return draws["admitted"] - len(draws["in_flight"]) if "in_flight" in draws else draws["next_slot"]

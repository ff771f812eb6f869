"""The values of the pages that put the rollouts of one draw in two runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from os.path import commonprefix
from statistics import fmean
from typing import Any

from torchtitan_rl.tools.view.pages import Missing
from torchtitan_rl.tools.view.query import Parameters
from torchtitan_rl.tools.view.runs import ShownRun
from torchtitan_rl.tools.view.text import CUT

__all__ = ["pair", "pairs"]

_MOST_DRAWS, _MOST_ROLLOUTS = 500, 64


@dataclass(kw_only=True, slots=True)
class PairedGroup:
    """The groups of one draw in two runs."""

    id: str
    task_id: str
    rewards: tuple[list[float | None], list[float | None]]
    """Of the first run and the second, for the rollouts that both have, in one order."""

    @property
    def num_other(self) -> int:
        """Rollouts with another reward."""
        return sum(a != b for a, b in zip(*self.rewards))

    @property
    def means(self) -> tuple[float | None, float | None]:
        first, second = map(_mean, self.rewards)
        return first, second

    @property
    def difference(self) -> float:
        """The second run's mean reward minus the first's."""
        first, second = self.means
        return 0.0 if first is None or second is None else second - first


def pairs(parameters: Parameters) -> dict[str, Any]:
    """The draws of a step in two runs, those whose rewards differ most first."""
    first, second = _two(parameters)
    common = sorted({*first.rollouts.steps()} & {*second.rollouts.steps()})
    step = parameters.whole("step")
    if step is None and common:
        step = common[-1]
    draws = [] if step is None else _paired(first.rollouts.groups(step), second.rollouts.groups(step))
    by_difference = sorted(draws, key=lambda draw: (-abs(draw.difference), -draw.num_other))
    return {
        "chosen": [first, second],
        "step": step,
        "previous": max((s for s in common if step is not None and s < step), default=None),
        "next": min((s for s in common if step is not None and s > step), default=None),
        "draws": by_difference[:_MOST_DRAWS],
        "num_draws": len(draws),
        "num_rollouts": sum(len(draw.rewards[0]) for draw in draws),
        "num_other": sum(draw.num_other for draw in draws),
        "means": [_mean([reward for draw in draws for reward in draw.rewards[i]]) for i in (0, 1)],
    }


def pair(parameters: Parameters) -> dict[str, Any]:
    """The rollouts of one draw in two runs."""
    first, second = _two(parameters)
    group_id, step = parameters.text("id"), parameters.whole("step")
    by_run = [
        {row["rollout_id"]: row for row in shown.rollouts.siblings(group_id, step)[:_MOST_ROLLOUTS]}
        for shown in (first, second)
    ]
    if missing := [shown.name for shown, rows in zip((first, second), by_run) if not rows]:
        raise Missing(f"group={group_id!r}: is not recorded in {missing[0]} at that step")
    rollouts = []
    for rollout_id in by_run[0].keys() & by_run[1].keys():
        records = [shown.rollouts.complete(rollout_id) or {} for shown in (first, second)]
        texts = [str(record.get("text") or "") for record in records]
        common = len(commonprefix(texts))
        sides = [
            {"run": shown, "row": rows[rollout_id], "same": text[:common], "other": text[common : common + CUT]}
            for shown, rows, text in zip((first, second), by_run, texts)
        ]
        rollouts.append({"id": rollout_id, "sides": sides, "token": _first_other_token(*records)})
    order = list(by_run[0])
    newest = first.rollouts.complete(order[0]) or {}
    return {
        "chosen": [first, second],
        "group_id": group_id,
        "step": by_run[0][order[0]]["step"],
        "prompt": newest.get("prompt"),
        "answer": newest.get("answer"),
        "rollouts": sorted(rollouts, key=lambda rollout: order.index(rollout["id"])),
    }


def _two(parameters: Parameters) -> tuple[ShownRun, ShownRun]:
    chosen = parameters.chosen()
    if len(chosen) < 2:
        raise ValueError("run: draws are compared between two runs; show two, and name both in the address")
    return chosen[0], chosen[1]


def _paired(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> list[PairedGroup]:
    rewards_of_second = {group["group_id"]: dict(zip(group["rollout_ids"], group["rewards"])) for group in second}
    draws = []
    for group in first:
        rewards = dict(zip(group["rollout_ids"], group["rewards"]))
        other = rewards_of_second.get(group["group_id"], {})
        if both := [rollout_id for rollout_id in rewards if rollout_id in other]:
            columns = [rewards[i] for i in both], [other[i] for i in both]
            draws.append(PairedGroup(id=group["group_id"], task_id=group["task_id"], rewards=columns))
    return draws


def _first_other_token(first: dict[str, Any], second: dict[str, Any]) -> int | None:
    """The place of the first sampled token that differs, over all turns; None: all are equal, -1: none are recorded."""
    tokens = [
        [token for turn in record.get("turns") or [] for token in turn.get("tokens") or []]
        for record in (first, second)
    ]
    if not any(tokens):
        return -1
    if tokens[0] == tokens[1]:
        return None
    return sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*tokens)))


def _mean(rewards: Sequence[float | None]) -> float | None:
    numbers = [reward for reward in rewards if reward is not None]
    return fmean(numbers) if numbers else None

"""Columns of training data, and the parts of a batch that take a step each."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum, RolloutGroup

__all__ = ["with_inputs", "without_inputs", "minibatches", "minibatch_groups", "tasks_of"]


def with_inputs(data: list[Datum], **columns: list[torch.Tensor]) -> list[Datum]:
    """New datums with loss inputs added or replaced: one (T,) or (T, n) tensor per datum and name."""
    return [
        dataclasses.replace(
            datum, loss_inputs={**datum.loss_inputs, **{name: rows[i] for name, rows in columns.items()}}
        )
        for i, datum in enumerate(data)
    ]


def without_inputs(data: list[Datum], *names: str) -> list[Datum]:
    """New datums without the named loss inputs; a datum may lack a name."""
    return [
        dataclasses.replace(datum, loss_inputs={n: x for n, x in datum.loss_inputs.items() if n not in names})
        for datum in data
    ]


def tasks_of(groups: list[RolloutGroup]) -> list[str]:
    """The task of each group, by its draw: the groups of several roles that played a task together have one task. A
    group of several tasks, which a grouping hook made, has the task of its first rollout; a group whose rollouts name
    no draw is a task of its own."""
    return [group.rollouts[0].group or group.id if group.rollouts else group.id for group in groups]


def minibatch_groups(tasks: list[str], config: AlgorithmConfig) -> list[list[int]]:
    """The groups of each minibatch, by index: those of `tasks_per_minibatch` tasks, the last with what is left; 0 is
    all. `tasks` names the task of each group. Tasks are in the order of their first groups."""
    groups_by_task: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        groups_by_task.setdefault(task, []).append(index)
    task_groups = list(groups_by_task.values())
    size = config.tasks_per_minibatch or max(1, len(task_groups))
    return [sorted(itertools.chain(*task_groups[start : start + size])) for start in range(0, len(task_groups), size)]


def minibatches(
    data: list[Datum], config: AlgorithmConfig, groups: list[RolloutGroup] | None = None
) -> list[list[Datum]]:
    """Cuts a batch into minibatches of `tasks_per_minibatch` tasks, with all groups of each, the last with what is
    left; 0 is the whole batch. `groups` are those that the data were made of; None: every group is a task of its own.
    `reduction` computes the token weights of each minibatch anew."""
    if not config.tasks_per_minibatch:
        return [data]
    present, parts = sorted({datum.group for datum in data}), []
    tasks = [str(index) for index in present] if groups is None else tasks_of([groups[index] for index in present])
    for group_indices in minibatch_groups(tasks, config):
        chosen = {present[i] for i in group_indices}
        part = [datum for datum in data if datum.group in chosen]
        weights = config.reduction([d.loss_inputs["loss_mask"] for d in part], [d.group for d in part])
        parts.append(with_inputs(part, token_weights=weights))
    return parts

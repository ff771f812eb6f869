"""Columns of training data, and the parts of a batch that take a step each."""

from __future__ import annotations

import dataclasses

import torch

from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import Datum

__all__ = ["with_inputs", "without_inputs", "minibatches"]


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


def minibatches(data: list[Datum], config: AlgorithmConfig) -> list[list[Datum]]:
    """Cuts a batch into minibatches of `tasks_per_minibatch` whole groups, the last with what is left; 0 is the whole
    batch. `reduction` computes the token weights of each minibatch anew."""
    groups, parts = sorted({datum.group for datum in data}), []
    size = config.tasks_per_minibatch or max(1, len(groups))
    for start in range(0, len(groups), size):
        chosen = set(groups[start : start + size])
        part = [datum for datum in data if datum.group in chosen]
        weights = config.reduction([d.loss_inputs["loss_mask"] for d in part], [d.group for d in part])
        parts.append(with_inputs(part, token_weights=weights))
    return parts

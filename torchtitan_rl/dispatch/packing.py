"""How a list of datums becomes microbatches for every data-parallel rank, and outputs become a list again."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchtitan_rl.types import Datum, Microbatch

__all__ = ["Plan", "plan_microbatches", "pack", "filler"]


@dataclass(slots=True)
class Plan:
    """`ranks[r][m]` lists the datums (by index into the data) of microbatch m of data-parallel rank r.

    Every rank has the same number of microbatches; an empty list is a filler that cannot train.
    """

    ranks: list[list[list[int]]]


def plan_microbatches(lengths: list[int], num_ranks: int, max_tokens: int) -> Plan:
    """Balances datums over ranks by tokens, then cuts each rank's share into microbatches of at most `max_tokens`.

    The cap is soft: a longer datum gets a microbatch of its own. Longest-first (LPT) balancing; within a rank
    datums go into the fullest microbatch that still has room (best fit), which wastes little of the budget.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in order:
        rank = loads.index(min(loads))
        ranks[rank].append(index)
        loads[rank] += lengths[index]
    planned = [_best_fit(share, lengths, max_tokens) for share in ranks]
    count = max(1, *(len(microbatches) for microbatches in planned))
    return Plan([microbatches + [[]] * (count - len(microbatches)) for microbatches in planned])


def _best_fit(share: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in share:
        fits = [b for b, free in enumerate(room) if free >= lengths[index]]
        if fits:
            chosen = min(fits, key=lambda b: (room[b], b))
        else:
            chosen = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[chosen].append(index)
        room[chosen] -= lengths[index]
    return [sorted(members) for members in bins]


def pack(data: list[Datum]) -> Microbatch:
    """Datums end to end. Raises ValueError when they carry different loss inputs."""
    names = data[0].loss_inputs.keys()
    for datum in data:
        if datum.loss_inputs.keys() != names:
            raise ValueError(
                f"datum.loss_inputs={sorted(datum.loss_inputs)}: another datum of the call has {sorted(names)}; "
                "give every datum of one call the same loss inputs"
            )
    return Microbatch(
        tokens_T=torch.cat([d.tokens for d in data]), target_tokens_T=torch.cat([d.target_tokens for d in data]),
        lengths=[len(d) for d in data],
        loss_inputs={name: torch.cat([d.loss_inputs[name] for d in data]).float() for name in names})


def filler(like: Datum) -> Microbatch:
    """One token that cannot train. Empty shards still run a forward: FSDP all-gathers on every rank."""
    return Microbatch(
        tokens_T=like.tokens[:1], target_tokens_T=like.target_tokens[:1], lengths=[1],
        loss_inputs={name: torch.zeros(1) for name in like.loss_inputs})

"""How a list of datums becomes microbatches for every data-parallel rank."""

from __future__ import annotations

import bisect

import torch

from torchtitan_rl.types import Datum, Microbatch, Routing

__all__ = ["Plan", "plan_microbatches", "check_alike", "check_lengths", "pack", "filler"]

Plan = list[list[list[int]]]
"""Of each rank, of each of its microbatches, the datums by index."""


def plan_microbatches(lengths: list[int], num_ranks: int, max_tokens: int) -> Plan:
    """Balances datums over ranks by tokens, longest first, then cuts each rank's share into microbatches.

    `plan[r][m]` lists the datums (by index into `lengths`) of microbatch m of rank r. Every rank has the same number of
    microbatches; an empty list is a filler that cannot train.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = loads.pop(0)
        ranks[rank].append(index)
        bisect.insort(loads, (load + lengths[index], rank))
    planned = [_best_fit(share, lengths, max_tokens) for share in ranks]
    count = max(1, *(len(microbatches) for microbatches in planned))
    return [microbatches + [[]] * (count - len(microbatches)) for microbatches in planned]


def _best_fit(share: list[int], lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Microbatches of at most `max_tokens`, a longer datum in one of its own. A datum goes into the fullest microbatch
    that has room."""
    bins: dict[int, list[int]] = {}
    rooms: list[tuple[int, int]] = []  # (tokens left, index of the microbatch), ascending
    for index in share:
        fullest = bisect.bisect_left(rooms, (lengths[index], 0))
        room, chosen = rooms.pop(fullest) if fullest < len(rooms) else (max_tokens, len(bins))
        bins.setdefault(chosen, []).append(index)
        bisect.insort(rooms, (room - lengths[index], chosen))
    return [sorted(members) for members in bins.values()]


def check_lengths(operation: str, data: list[Datum], limit: int) -> None:
    """Raises ValueError for no data, and for a datum of more tokens than the trainer's context, `limit`."""
    if not data:
        raise ValueError(f"{operation}.data=[]: no datums; skip the call when nothing is left to train on")
    for index, datum in enumerate(data):
        if len(datum) > limit:
            raise ValueError(
                f"{operation}.data[{index}]: {len(datum)} tokens, the trainer's context is "
                f"trainer.training.seq_len={limit}; raise it or shorten the datum"
            )


def check_alike(data: list[Datum], name: str = "data") -> None:
    """Raises ValueError, naming the datum, unless all datums have the same loss inputs, each with the same number of
    values per token."""
    first = _row_shapes(data[0])
    for index, datum in enumerate(data):
        shapes = _row_shapes(datum)
        if shapes.keys() != first.keys():
            has, wanted = (sorted(rows.keys() - {"target_tokens"}) for rows in (shapes, first))
            raise ValueError(
                f"{name}[{index}].loss_inputs={has}: data[0] of the call has {wanted}; give every datum of one call "
                "the same loss inputs"
            )
        for key, shape in shapes.items():
            if shape != first[key]:
                raise ValueError(
                    f"{name}[{index}].{key}: is {_shape_text(shape)} where that of data[0] is "
                    f"{_shape_text(first[key])}; give every datum of one call as many per token"
                )
        if _routing_kind(datum) != _routing_kind(data[0]):
            raise ValueError(
                f"{name}[{index}].routing: is {_routing_kind(datum)} where that of data[0] is "
                f"{_routing_kind(data[0])}, as (layers, K, replayed); give every datum of one call the same kind"
            )


def _shape_text(row: torch.Size) -> str:
    return f"(T, {row[0]})" if row else "(T,)"


def _routing_kind(datum: Datum) -> tuple[int, int, bool] | None:
    routing = datum.routing
    return None if routing is None else (*routing.experts.shape[1:], routing.replayed)


def _row_shapes(datum: Datum) -> dict[str, torch.Size]:
    return {"target_tokens": datum.target_tokens.shape[1:], **{n: x.shape[1:] for n, x in datum.loss_inputs.items()}}


def pack(data: list[Datum], shared: list[int] | None = None) -> Microbatch:
    """Datums end to end; `shared` as in `Microbatch.shared`. Raises ValueError when datums carry different loss inputs,
    or rows of different sizes."""
    check_alike(data)
    return Microbatch(
        tokens_T=torch.cat([d.tokens for d in data]),
        target_tokens_T=torch.cat([d.target_tokens for d in data]),
        lengths=[len(d) for d in data],
        turns=[d.turns for d in data],
        loss_inputs={n: _sent(n, torch.cat([d.loss_inputs[n] for d in data])) for n in data[0].loss_inputs},
        shared=shared,
        routing=_packed_routing([d.routing for d in data if d.routing is not None]),
    )


def _packed_routing(routings: list[Routing]) -> Routing | None:
    if not routings:
        return None
    return Routing(experts=torch.cat([r.experts for r in routings]), replayed=routings[0].replayed)


def _sent(name: str, rows: torch.Tensor) -> torch.Tensor:
    # Hidden states, in bfloat16, are large; token ids are in int64.
    if rows.dtype == torch.int64:
        raise ValueError(
            f"loss input {name!r}: holds token ids, which no loss reads; make targets of them with "
            "algorithm.soft_targets.appended(data)"
        )
    return rows if rows.dtype == torch.bfloat16 else rows.float()


def filler(like: Datum) -> Microbatch:
    """One token that cannot train. Empty shards still run a forward: FSDP all-gathers on every rank."""
    return Microbatch(
        tokens_T=like.tokens[:1],
        target_tokens_T=like.target_tokens[:1],
        lengths=[1],
        turns=[None if like.turns is None else []],
        loss_inputs={name: _sent(name, torch.zeros_like(rows[:1])) for name, rows in like.loss_inputs.items()},
        routing=None
        if like.routing is None
        else Routing(experts=like.routing.experts[:1].clone(), replayed=like.routing.replayed),
    )

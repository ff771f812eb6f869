"""Weights in pieces: a piece is a box of one tensor, and lies on the host of the trainer rank that holds the box.

A trainer rank cuts its shards such that a generator rank needs a piece whole or not at all, whatever the
tensor-parallel degree of the generators. A region that several ranks hold (replicas of HSDP, norms under tensor
parallelism) is published by one rank on each host.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_rl.model.generator_cut import cut_dim, num_cuts
from torchtitan_rl.weights.layout import Manifest, TensorEntry, pickled_at_once

__all__ = [
    "MAX_PIECE_BYTES",
    "AnyManifest",
    "Box",
    "Piece",
    "Source",
    "PieceManifest",
    "HeadRows",
    "cut",
    "owners",
    "check_complete",
    "regions",
]

MAX_PIECE_BYTES = 2**24
"""Larger boxes are cut by rows. Four transfers at a time hold one bucket of 64 MiB at most."""


class Box(NamedTuple):
    """A part of a tensor: the first index and the length in each dimension."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The indices of this box in a tensor that is `outer`."""
        starts = [mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))

    def rows(self, first: int, end: int, dim: int = 0) -> Box:
        """The part of this box between two indices of the whole tensor along `dim`."""
        offsets, shape = list(self.offsets), list(self.shape)
        offsets[dim], shape[dim] = first, end - first
        return Box(tuple(offsets), tuple(shape))


class Piece(NamedTuple):
    """A box of the tensor `name`, and where its bytes lie in the publisher's segment."""

    name: str
    box: Box
    start: int
    nbytes: int
    checksum: str = ""


@dataclass(kw_only=True, slots=True)
class Source:
    """What one trainer rank publishes of a version."""

    rank: int
    host: str
    """The identity of the rank's host, see `piece_server.own_host`."""
    address: tuple[str, int]
    """Where the rank's `PieceServer` listens."""
    handle: str
    """The path of the rank's segment for processes of its host."""
    nbytes: int
    token: str
    """Names this publication; without it the server gives nothing away."""
    pieces: list[Piece]


@dataclass(kw_only=True, slots=True)
class PieceManifest:
    """Everything about a version that is published in pieces, except the bytes of the weights."""

    version: int | str
    entries: dict[str, TensorEntry]
    """Shape and dtype of every whole tensor, by torchtitan's name; offsets are unused."""
    aliases: dict[str, str]
    """Names of tensors that are other tensors' memory, such as a tied head: name -> the name that has pieces."""
    sources: list[Source]
    base: str = ""
    """Empty, as the next two: adapters alone are not published in pieces."""
    handle: str = ""
    """Empty: the bytes are not all in one place."""
    host: str = ""

    def stored(self) -> dict[str, TensorEntry]:
        """The entries by the names that pieces have."""
        return {self.aliases.get(name, name): entry for name, entry in self.entries.items()}

    def __reduce__(self) -> tuple:
        return pickled_at_once(self)


AnyManifest = Manifest | PieceManifest


@dataclass(frozen=True, slots=True)
class HeadRows:
    """How the rows of a fused query-key-value weight fall to wq, wk and wv: per KV head `heads_per_kv` query heads, a
    key head and a value head, each of `head_dim` rows."""

    heads_per_kv: int
    head_dim: int

    def shapes(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parts of a fused weight of `shape`."""
        prefix, _, kind = name.rpartition("wqkv.")
        n_kv_heads = shape[0] // ((self.heads_per_kv + 2) * self.head_dim)
        for part, heads in (("wq", self.heads_per_kv), ("wk", 1), ("wv", 1)):
            yield f"{prefix}{part}.{kind}", (n_kv_heads * heads * self.head_dim, *shape[1:])

    def split(self, name: str, box: Box) -> Iterator[tuple[str, Box, Box]]:
        """The runs of a box's rows: name of the part, the box there, the box in the fused weight."""
        prefix, _, kind = name.rpartition("wqkv.")
        query, one = self.heads_per_kv * self.head_dim, self.head_dim
        first, end = box.offsets[0], box.offsets[0] + box.shape[0]
        while first < end:
            head, row = divmod(first, query + 2 * one)
            part, begin, length = ("wq", 0, query) if row < query else ("wk", query, one)
            if row >= query + one:
                part, begin = "wv", query + one
            stop = min(end, first - row + begin + length)
            there = head * length + row - begin
            yield f"{prefix}{part}.{kind}", box.rows(there, there + stop - first), box.rows(first, stop)
            first = stop


def cut(name: str, box: Box, whole: tuple[int, ...], itemsize: int, n_kv_heads: int) -> Iterator[Box]:
    """Cuts a box of the tensor `name`, of shape `whole`: each part lies in one generator rank's share and holds at most
    `MAX_PIECE_BYTES`, or one row."""
    dim, boxes = cut_dim(name), [box] if box.numel else []
    if dim is not None:
        width = whole[dim] // num_cuts(whole[dim], n_kv_heads)
        boxes = [part for one in boxes for part in _every(one, dim, width, one.offsets[dim] % width)]
    for one in boxes:
        row_bytes = itemsize * one.numel // one.shape[0] if one.shape else 0
        if not one.shape or row_bytes * one.shape[0] <= MAX_PIECE_BYTES:
            yield one
        else:
            yield from _every(one, 0, max(1, MAX_PIECE_BYTES // row_bytes), 0)


def _every(box: Box, dim: int, width: int, begun: int) -> Iterator[Box]:
    """Parts of `width` along `dim`; `begun`: what the first part lacks."""
    first, end = box.offsets[dim], box.offsets[dim] + box.shape[dim]
    while first < end:
        stop = min(end, first + width - begun)
        yield box.rows(first, stop, dim)
        first, begun = stop, 0


RankBoxes = dict[str, tuple[Box, int]]
"""Per tensor of a rank: the box that the rank holds, and bytes per element."""


def owners(boxes_of_ranks: list[RankBoxes], hosts: list[str]) -> list[set[str]]:
    """Per rank, the names of the tensors of which that rank publishes its box. Of the ranks of one host that hold the
    same box, the one with the fewest bytes so far publishes it."""
    published: list[set[str]] = [set() for _ in boxes_of_ranks]
    num_bytes = [0] * len(boxes_of_ranks)
    for name in boxes_of_ranks[0]:
        ranks = defaultdict(list)
        for rank, boxes in enumerate(boxes_of_ranks):
            if boxes[name][0].numel:
                ranks[boxes[name][0], hosts[rank]].append(rank)
        for (box, _), alike in ranks.items():
            owner = min(alike, key=num_bytes.__getitem__)
            published[owner].add(name)
            num_bytes[owner] += box.numel * boxes_of_ranks[owner][name][1]
    return published


def check_complete(boxes_of_ranks: list[RankBoxes], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raises RuntimeError unless the boxes that all ranks hold make up every tensor once."""
    for name, shape in shapes.items():
        num_elements = sum(box.numel for box in {boxes[name][0] for boxes in boxes_of_ranks})
        if num_elements != math.prod(shape):
            raise RuntimeError(
                f"{name}: the ranks' shards have {num_elements} elements, the tensor {math.prod(shape)}; this layout "
                "cannot be published in pieces, give the trainer another layout"
            )


def regions(sources: Iterable[Source]) -> dict[tuple[str, Box], list[tuple[Source, int]]]:
    """Every region (tensor, box) of a version once, in a fixed order: its publishers, each with the index of the
    region's piece there."""
    publishers: dict[tuple[str, Box], list[tuple[Source, int]]] = {}
    for source in sources:
        for index, piece in enumerate(source.pieces):
            publishers.setdefault((piece.name, piece.box), []).append((source, index))
    return publishers

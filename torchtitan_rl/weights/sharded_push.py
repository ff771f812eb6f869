"""How trainer ranks publish their own shards, in pieces that stay on their hosts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from torchtitan_rl import platform
from torchtitan_rl.model import lora
from torchtitan_rl.model.module_state import fused_state
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.finite import FiniteCheck, NotFinite
from torchtitan_rl.weights.piece_server import PieceServer, own_host
from torchtitan_rl.weights.pieces import Box, Piece, PieceManifest, Source, check_complete, owners
from torchtitan_rl.weights.trainer_shards import LocalShard, entries_of, local_shards, pieces_of

__all__ = ["Publisher", "payload_bytes", "push", "write_pieces"]


class Publisher:
    """What a trainer rank keeps between publications."""

    def __init__(self) -> None:
        self.server: PieceServer | None = None
        self.owned: dict[tuple[str, ...], set[str]] = {}
        """By the names of a publication's tensors: those of which this rank publishes its box."""

    def serve(self, buffers: layout.SharedBuffers) -> PieceServer:
        """The server of what lies in `buffers`."""
        if self.server is None:
            self.server = PieceServer(buffers)
        return self.server

    def close(self) -> None:
        if self.server is not None:
            self.server.close()


def push(
    exchange: Any, version: int | str, dtype: torch.dtype | None, only: str | None, *, merged: bool = True
) -> PieceManifest | NotFinite | None:
    """Writes `version` of a `WeightExchange` in pieces; see its `push`. Every rank of the mesh makes the same call.

    Adapters are merged box by box: a rank gathers whole adapters, and no whole weight. Each piece has a checksum.
    Raises RuntimeError when the ranks' shards do not make up the model.
    """
    state = fused_state(exchange.model)
    adapters = lora.layer_adapters(state, exchange.lora) if merged and exchange.lora is not None else {}
    shards, aliases = local_shards(exchange.model, state), exchange.aliases
    if only is not None:
        shards = {name: tensor for name, tensor in shards.items() if name == aliases.get(only, only)}
        aliases = {name: kept for name, kept in aliases.items() if name == only}
    dtypes = _dtypes(exchange, shards, dtype)
    owned = {name: shards[name] for name in shards if name in _owned(exchange.pieces, shards, dtypes)}
    check = FiniteCheck()
    source = write_pieces(exchange, dist.get_rank(), version, owned, dtypes, adapters, check)
    answers: list | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((source, check.first()), answers)  # every rank's pieces are there before the version exists
    if answers is None:
        return None
    sources = [source for source, _ in answers]
    if first := next((first for _, first in answers if first), ""):
        return NotFinite(version=version, tensor=first)
    entries = {part: entry for name in shards for part, entry in entries_of(name, shards[name], dtypes[name]).items()}
    entries |= {name: entries[kept] for name, kept in aliases.items()}
    entries = entries if only is None else {only: entries[only]}
    return PieceManifest(version=version, entries=entries, aliases=aliases, sources=sources)


def payload_bytes(exchange: Any, dtype: torch.dtype | None) -> int:
    """Bytes of the segment of this rank's pieces of a version. A collective call until a version has been pushed."""
    shards = local_shards(exchange.model)
    dtypes = _dtypes(exchange, shards, dtype)
    owned = {name: shards[name] for name in shards if name in _owned(exchange.pieces, shards, dtypes)}
    return _cut(owned, dtypes, exchange.n_kv_heads)[1]


def _dtypes(exchange: Any, shards: dict[str, LocalShard], dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    return {
        name: tensor.values.dtype if dtype is None or name in exchange.buffer_names else dtype
        for name, tensor in shards.items()
    }


def _owned(publisher: Publisher, shards: dict[str, LocalShard], dtypes: dict[str, torch.dtype]) -> set[str]:
    """The tensors of which this rank publishes its box; at the first publication a collective call."""
    names = tuple(shards)
    if names not in publisher.owned:
        mine = {name: (tensor.box, dtypes[name].itemsize) for name, tensor in shards.items()}
        answers: list = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (mine, own_host()))
        boxes, hosts = [boxes for boxes, _ in answers], [host for _, host in answers]
        check_complete(boxes, {name: tensor.shape for name, tensor in shards.items()})
        publisher.owned[names] = owners(boxes, hosts)[dist.get_rank()]
    return publisher.owned[names]


def write_pieces(
    exchange: Any,
    rank: int,
    version: int | str,
    owned: dict[str, LocalShard],
    dtypes: dict[str, torch.dtype],
    adapters: lora.Adapters,
    check: FiniteCheck,
) -> Source:
    """Writes a trainer rank's pieces into a segment of a `WeightExchange` and serves them. `check` looks at each."""
    cuts, nbytes = _cut(owned, dtypes, exchange.n_kv_heads)
    handle, buffer = exchange.buffers.take(version, nbytes)
    for name, box, piece in cuts:
        values = owned[name].values[box.within(owned[name].box)]
        if name in adapters:
            values = lora.merge(name, values, {name: _part_of(adapters[name], box)})
        place = buffer[piece.start : piece.start + piece.nbytes].view(dtypes[name]).view(box.shape)
        # Cast on the CUDA device: that may halve the bytes copied.
        place.copy_(values.to(place.dtype) if values.is_cuda else values, non_blocking=True)
        check.add(name, values, place)
    platform.wait_for_copies()
    pieces = [
        piece._replace(checksum=layout.checksum(buffer[piece.start : piece.start + piece.nbytes]))
        for _, _, piece in cuts
    ]
    server = exchange.pieces.serve(exchange.buffers)
    return Source(
        rank=rank,
        host=own_host(),
        address=server.address,
        handle=handle,
        nbytes=buffer.numel(),
        token=server.offer(version, buffer, pieces),
        pieces=pieces,
    )


def _cut(
    owned: dict[str, LocalShard], dtypes: dict[str, torch.dtype], n_kv_heads: int
) -> tuple[list[tuple[str, Box, Piece]], int]:
    """(name of the tensor, box in it, piece in its place) of each piece, and the bytes of all."""
    cuts: list[tuple[str, Box, Piece]] = []
    end = 0
    for name, tensor in owned.items():
        for box, piece in pieces_of(name, tensor, dtypes[name], n_kv_heads):
            cuts.append((name, box, piece._replace(start=end)))
            end += -(-piece.nbytes // layout.ALIGNMENT) * layout.ALIGNMENT
    return cuts, max(end, layout.ALIGNMENT)


def _part_of(adapter: tuple[torch.Tensor, torch.Tensor, float], box: Box) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The adapter of a box: the columns of A and the rows of B."""
    a, b, scaling = adapter
    (row, column), (rows, columns) = box
    return a[:, column : column + columns], b[row : row + rows], scaling

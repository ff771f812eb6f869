"""What a trainer rank holds of its model, tensor by tensor, and how that is cut into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.models.common.attention import FusedQKVLinear

from torchtitan_rl.model.lora import base_state
from torchtitan_rl.model.module_state import fused_state
from torchtitan_rl.model.sharding import plain_name
from torchtitan_rl.weights.layout import TensorEntry
from torchtitan_rl.weights.pieces import Box, HeadRows, Piece, cut

__all__ = ["LocalShard", "aliases_of", "box_of", "local_shards", "pieces_of", "entries_of"]


class LocalShard(NamedTuple):
    """This rank's box of a tensor as the trainer holds it, a query-key-value weight fused."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    values: torch.Tensor
    """Of the box, in the trainer's dtype."""
    heads: HeadRows | None
    """Of a fused weight."""


def aliases_of(model: torch.nn.Module) -> dict[str, str]:
    """Further names of parameters that have several, such as a tied head's: name -> the parameter's first name."""
    first: dict[int, str] = {}
    aliases = {}
    for long_name, parameter in model.named_parameters(remove_duplicate=False):
        name = plain_name(long_name)
        if first.setdefault(id(parameter), name) != name:
            aliases[name] = first[id(parameter)]
    return aliases


def box_of(tensor: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """This rank's box of a tensor, and the tensor's values there. Raises RuntimeError when torch's account of a
    DTensor's layout does not fit its local tensor."""
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach()
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    if tuple(local.shape) != tuple(shape):
        raise RuntimeError(
            f"shape={tuple(tensor.shape)}, placements={tensor.placements}: this rank holds {tuple(local.shape)}, torch "
            f"says {tuple(shape)}; give the trainer another layout"
        )
    return Box(tuple(offsets), tuple(shape)), local


def local_shards(model: torch.nn.Module, state: dict[str, torch.Tensor] | None = None) -> dict[str, LocalShard]:
    """Every tensor of the model but adapters, once. Not a collective call, and no copies."""
    aliases = aliases_of(model)
    heads = {
        f"{plain_name(name)}.wqkv": HeadRows(module.heads_per_kv, module.head_dim)
        for name, module in model.named_modules()
        if isinstance(module, FusedQKVLinear)
    }
    shards = {}
    for name, tensor in base_state(fused_state(model) if state is None else state).items():
        if name not in aliases:
            box, values = box_of(tensor)
            shards[name] = LocalShard(tuple(tensor.shape), box, values, heads.get(name.rpartition(".")[0]))
    return shards


def pieces_of(name: str, shard: LocalShard, dtype: torch.dtype, n_kv_heads: int) -> Iterator[tuple[Box, Piece]]:
    """Cuts this rank's box into pieces of `dtype`, which have no places and checksums yet. Yields (box in the shard's
    own tensor, piece under torchtitan's name)."""
    runs = [(name, shard.box, shard.box)] if shard.heads is None else shard.heads.split(name, shard.box)
    shapes = {part: shape for part, shape in _parts(name, shard)}
    for part, there, here in runs:
        for box in cut(part, there, shapes[part], dtype.itemsize, n_kv_heads):
            offsets = [first + mine - its for first, mine, its in zip(here.offsets, box.offsets, there.offsets)]
            yield Box(tuple(offsets), box.shape), Piece(part, box, 0, box.numel * dtype.itemsize)


def entries_of(name: str, shard: LocalShard, dtype: torch.dtype) -> dict[str, TensorEntry]:
    """Manifest entries of the whole tensors that a shard is part of, by torchtitan's names: three of a fused weight."""
    return {part: TensorEntry(shape, dtype, 0) for part, shape in _parts(name, shard)}


def _parts(name: str, shard: LocalShard) -> list[tuple[str, tuple[int, ...]]]:
    if shard.heads is None:
        return [(name, shard.shape)]
    return list(shard.heads.shapes(name, shard.shape))

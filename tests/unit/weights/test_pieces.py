"""Boxes, cuts and owners: whatever the layout, the pieces make up every tensor once, and no piece crosses a cut."""

import itertools
import random

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_rl.weights import pieces
from torchtitan_rl.weights.pieces import Box, HeadRows, check_complete, cut, owners
from torchtitan_rl.weights.staging import part_box


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(first, first + n) for first, n in zip(box.offsets, box.shape))))


def test_a_box_is_cut_at_every_share_of_a_generator_rank_and_by_rows(monkeypatch):
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 40)  # ten elements
    # wo, 6 x 8 in whole; 4 KV heads cut dimension 1 into 4 parts of 2; the box begins within a part.
    found = list(cut("layers.0.attention.wo.weight", Box((1, 3), (5, 5)), (6, 8), 4, 4))
    assert found == [Box((1, 3), (5, 1)), Box((1, 4), (5, 2)), Box((1, 6), (5, 2))]
    # A norm is whole on every rank, and an embedding is cut by rows alone.
    assert list(cut("norm.weight", Box((2,), (3,)), (8,), 4, 4)) == [Box((2,), (3,))]
    assert list(cut("tok_embeddings.weight", Box((3, 0), (7, 4)), (67, 4), 4, 4)) == [
        Box((3, 0), (2, 4)), Box((5, 0), (2, 4)), Box((7, 0), (2, 4)), Box((9, 0), (1, 4)),
    ]  # fmt: skip
    assert list(cut("norm.weight", Box((8,), (0,)), (8,), 4, 4)) == []  # a rank that got nothing


def test_rows_of_a_fused_weight_fall_to_query_key_and_value():
    heads = HeadRows(heads_per_kv=2, head_dim=3)  # 12 rows per KV head: 6 of queries, 3, 3
    found = list(heads.split("layers.1.attention.wqkv.weight", Box((4, 0), (15, 5))))
    rows = [(name.split(".")[-2], there.offsets[0], there.shape[0], here.offsets[0]) for name, there, here in found]
    assert rows == [
        ("wq", 4, 2, 4), ("wk", 0, 3, 6), ("wv", 0, 3, 9), ("wq", 6, 6, 12), ("wk", 3, 1, 18),
    ]  # fmt: skip
    assert dict(heads.shapes("a.wqkv.weight", (24, 5))) == {
        "a.wq.weight": (12, 5), "a.wk.weight": (6, 5), "a.wv.weight": (6, 5),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_pieces_of_any_layout_make_up_the_tensor_once(seed, monkeypatch):
    """FSDP x TP x HSDP with uneven shards, as FSDP cuts them: along TP first, then what TP leaves, along rows."""
    draw = random.Random(seed)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", draw.choice([16, 64, 10**6]))
    replicas, shards, tp, kv = draw.randint(1, 3), draw.randint(1, 4), draw.choice([1, 2, 4]), draw.choice([2, 4])
    name, dim = draw.choice([("a.w1.weight", 0), ("a.w2.weight", 1), ("lm_head.weight", 0), ("norm.weight", None)])
    shape = (draw.randint(1, 6) * 4 + (draw.randint(0, 3) if name == "lm_head.weight" else 0), 4 * draw.randint(1, 3))
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    placements = {
        0: (Replicate(), _StridedShard(0, split_factor=tp), Shard(0)),
        1: (Replicate(), Shard(0), Shard(1)),
        None: (Replicate(), Shard(0), Replicate()),
    }[dim]
    held, hosts = [], []
    for coordinate in itertools.product(range(replicas), range(shards), range(tp)):
        of_tp = whole if dim is None else (whole.chunk(tp, dim) + (whole[:0],) * tp)[coordinate[2]]
        local = (of_tp.chunk(shards, 0) + (of_tp[:0],) * shards)[coordinate[1]]
        size, offsets = _compute_local_shape_and_global_offset(
            shape, (replicas, shards, tp), list(coordinate), placements
        )
        box = Box(tuple(offsets), tuple(size))
        assert local.numel() == box.numel
        assert not box.numel or torch.equal(whole[box.within(Box((0, 0), shape))], local)
        held.append({name: (box, 4)})
        hosts.append(f"host{coordinate[0] % 2}")
    check_complete(held, {name: shape})
    chosen = owners(held, hosts)
    for host in sorted(set(hosts)):  # each host with a replica has every element once
        seen: list[tuple[int, ...]] = []
        for rank, names in enumerate(chosen):
            if hosts[rank] == host and name in names:
                for box in cut(name, held[rank][name][0], shape, 4, kv):
                    seen += indices(box)
                    for size in (size for size in (1, 2, 4) if kv % size == 0):
                        inside = [indices(box) <= indices(part_box(name, shape, rank, size)) for rank in range(size)]
                        assert sum(inside) == (1 if name[:2] == "a." else size)
        assert sorted(seen) == sorted(indices(Box((0, 0), shape)))


def test_replicas_share_the_work_and_a_hole_is_refused():
    box, half = Box((0, 0), (4, 4)), Box((0, 0), (2, 4))
    held = [{"a": (box, 2), "b": (box, 2), "c": (half, 2)} for _ in range(2)]
    assert owners(held, ["x", "x"]) == [{"a", "c"}, {"b"}]  # rank 1 has fewer bytes when b comes
    assert owners(held, ["x", "y"]) == [{"a", "b", "c"}] * 2  # a copy per host: no host asks another for its own
    with pytest.raises(RuntimeError, match="c: the ranks' shards have 8 elements, the tensor 16"):
        check_complete(held, {"a": (4, 4), "c": (4, 4)})

"""Heads for attention out of a layer's one product, by a Triton kernel: `kernels.py` imports this module on CUDA only.

Apart, torch's operators copy query, key and value out of the product, norm the heads of query and key, and rotate them
in float32: ten operators, which a decode step launches for each layer. The kernel does all in one read and one write,
and rounds where they round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["fused_heads"]


@triton.jit
def _heads(
    product,
    query_weight,
    key_weight,
    eps,
    table,
    positions,
    query,
    key,
    value,
    num_groups,
    NUM_QUERIES: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
):
    """One program per token and group of heads: its query heads, then its key, then its value. x and y are
    the two dimensions of each pair that turns together."""
    program = tl.program_id(0)
    token = (program // num_groups).to(tl.int64)  # the offset of a token may pass 2^31
    group = program % num_groups
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    pairs = tl.arange(0, BLOCK_PAIRS)[None, :]
    in_head = pairs < NUM_PAIRS
    inside = (heads < NUM_QUERIES + 2) & in_head
    is_query, is_key, is_value = heads < NUM_QUERIES, heads == NUM_QUERIES, heads == NUM_QUERIES + 1
    first = pairs if HALVES else 2 * pairs
    apart = NUM_PAIRS if HALVES else 1  # from the first to the second dimension of a pair
    HEAD: tl.constexpr = 2 * NUM_PAIRS

    dtype = product.dtype.element_ty
    place = product + ((token * num_groups + group) * (NUM_QUERIES + 2) + heads) * HEAD + first
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(place + apart, mask=inside, other=0.0).to(tl.float32)
    turns = is_query | is_key
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD + eps)[:, None]
        for_query = tl.load(query_weight + first, mask=in_head, other=0.0).to(tl.float32)
        for_key = tl.load(key_weight + first, mask=in_head, other=0.0).to(tl.float32)
        normed = (x * scale * tl.where(is_query, for_query, for_key)).to(dtype).to(tl.float32)
        x = tl.where(turns, normed, x)
        for_query = tl.load(query_weight + first + apart, mask=in_head, other=0.0).to(tl.float32)
        for_key = tl.load(key_weight + first + apart, mask=in_head, other=0.0).to(tl.float32)
        normed = (y * scale * tl.where(is_query, for_query, for_key)).to(dtype).to(tl.float32)
        y = tl.where(turns, normed, y)
    row = table + tl.load(positions + token) * HEAD + pairs
    cosine = tl.load(row, mask=in_head, other=0.0)
    sine = tl.load(row + NUM_PAIRS, mask=in_head, other=0.0)
    out_x = tl.where(turns, x * cosine - y * sine, x).to(dtype)
    out_y = tl.where(turns, y * cosine + x * sine, y).to(dtype)

    place = query + ((token * num_groups + group) * NUM_QUERIES + heads) * HEAD + first
    tl.store(place, out_x, mask=inside & is_query)
    tl.store(place + apart, out_y, mask=inside & is_query)
    place = key + (token * num_groups + group + heads - NUM_QUERIES) * HEAD + first
    tl.store(place, out_x, mask=inside & is_key)
    tl.store(place + apart, out_y, mask=inside & is_key)
    place = value + (token * num_groups + group + heads - NUM_QUERIES - 1) * HEAD + first
    tl.store(place, out_x, mask=inside & is_value)
    tl.store(place + apart, out_y, mask=inside & is_value)


def fused_heads(
    product: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    *,
    head_dim: int,
    queries_per_key: int,
    halves: bool,
    norms: tuple[torch.Tensor, torch.Tensor, float] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value, each (tokens, heads x head_dim), the first two normed and rotated.

    `product`: (tokens, groups x (`queries_per_key` query heads, key, value) x head_dim), of torchtitan's fused matrix.
    `table`: (positions, head_dim) in float32, for each position the cosines and then the sines of its pairs.
    `positions`: (tokens,). `halves`: dimension i is paired with i + head_dim / 2, otherwise 2i with 2i + 1.
    `norms`: the weights (head_dim,) of query and key and the epsilon of their RMS norms; None: there are none."""
    num_tokens, group = len(product), (queries_per_key + 2) * head_dim
    num_groups = product.shape[1] // group
    product = product.contiguous()
    query = product.new_empty(num_tokens, num_groups * queries_per_key * head_dim)
    key, value = (product.new_empty(num_tokens, num_groups * head_dim) for _ in range(2))
    query_weight, key_weight, eps = (product, product, 0.0) if norms is None else norms  # no program reads the former
    _heads[(num_tokens * num_groups,)](
        product,
        query_weight,
        key_weight,
        eps,
        table,
        positions,
        query,
        key,
        value,
        num_groups,
        NUM_QUERIES=queries_per_key,
        NUM_PAIRS=head_dim // 2,
        HAS_NORM=norms is not None,
        HALVES=halves,
        BLOCK_HEADS=triton.next_power_of_2(queries_per_key + 2),
        BLOCK_PAIRS=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )
    return query, key, value

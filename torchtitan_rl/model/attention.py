"""Training attention over packed documents that runs anywhere: dense batches of documents of similar lengths.

torchtitan's decoder hands its argument `attention_masks` to each layer's inner attention. `PackedSDPA` takes a
`PackedDocuments` there, the layout of packed tokens in a few dense, right-padded batches. Under a causal mask right
padding is invisible to real tokens, so no mask is needed. Plain causal attention is one scaled-dot-product call per
batch. Torch has no such call for sliding windows without a mask of all pairs, and none that gives the log-sum-exp with
its gradient, which sinks need: `attend` computes both by definition, a block of queries at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torchtitan.models.common.attention import VarlenAttention

from torchtitan_rl import adapters

__all__ = ["PackedDocuments", "PackedSDPA", "attend", "needs_whole_heads"]

adapters.adapt_torchtitan()

_MAX_PADDING = 1.25  # a bucket's longest document may be this much longer than its shortest, plus 8 tokens
_QUERIES_AT_ONCE = 512  # `attend` holds the scores of so many queries of every document


class PackedDocuments(NamedTuple):
    """Indices that lay packed documents out in dense batches and back."""

    to_dense_P: torch.Tensor
    """For every slot of every bucket, the packed token that fills it (token 0 in padding)."""
    to_packed_T: torch.Tensor
    """For every packed token, its slot."""
    buckets: tuple[tuple[int, int], ...]
    """(documents, padded length) of each bucket; the products add up to P."""
    lengths: tuple[int, ...]
    """Tokens of each document, in packed order."""

    @classmethod
    def build(cls, lengths: list[int], device: torch.device | str = "cpu") -> PackedDocuments:
        """`lengths`: tokens of each document, in packed order."""
        documents = sorted(torch.arange(sum(lengths)).split(lengths), key=len)
        to_dense: list[torch.Tensor] = []
        buckets, to_packed, slot = [], torch.empty(sum(lengths), dtype=torch.long), 0
        while documents:
            limit = int(len(documents[0]) * _MAX_PADDING) + 8
            num = next((i for i, document in enumerate(documents) if len(document) > limit), len(documents))
            members, documents = documents[:num], documents[num:]
            buckets.append((num, len(members[-1])))
            to_dense.append(pad_sequence(members, batch_first=True).flatten())
            for document in members:
                to_packed[document] = torch.arange(slot, slot + len(document))
                slot += len(members[-1])
        return cls(torch.cat(to_dense).to(device), to_packed.to(device), tuple(buckets), tuple(lengths))


class _ToDense(torch.autograd.Function):
    """Packed (T, ...) to dense (P, ...). Padding takes no part in any result, so only real slots carry gradient."""

    @staticmethod
    def forward(ctx, packed, to_dense_P, to_packed_T):
        ctx.save_for_backward(to_packed_T)
        return packed.index_select(0, to_dense_P)

    @staticmethod
    def backward(ctx, grad):
        (to_packed_T,) = ctx.saved_tensors
        return grad.index_select(0, to_packed_T), None, None


class _ToPacked(torch.autograd.Function):
    """Dense (P, ...) to packed (T, ...); padding gets exactly zero gradient."""

    @staticmethod
    def forward(ctx, dense, to_packed_T):
        ctx.save_for_backward(to_packed_T)
        ctx.num_slots = dense.shape[0]
        return dense.index_select(0, to_packed_T)

    @staticmethod
    def backward(ctx, grad):
        (to_packed_T,) = ctx.saved_tensors
        dense = grad.new_zeros((ctx.num_slots, *grad.shape[1:]))
        return dense.index_copy_(0, to_packed_T, grad.contiguous()), None


def _without_gqa(x_BLNH: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Key or value heads, each repeated once per query head that shares the head."""
    return x_BLNH.repeat_interleave(n_heads // x_BLNH.shape[2], 2)


class PackedSDPA(VarlenAttention):
    """Causal attention within each packed document, with an optional window.

    A subclass of torchtitan's variable-length attention so that its sharding contract (the parameter
    names below) applies unchanged. B must be 1: documents are packed along L.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        before, after = config.window_size
        assert after == 0, "only causal attention is implemented here"
        self.window = None if before == -1 else before + 1

    def forward(
        self,
        q_BLNH,
        k_BLNH,
        v_BLNH,
        *,
        attention_masks: PackedDocuments,
        scale=None,
        enable_gqa=False,
        out_transform=None,
        **kwargs,
    ):
        """`out_transform`, such as a layer's sinks, gets attention's output (T, N, H) and the log-sum-exp of each
        query's scores (T, N)."""
        layout = attention_masks
        explicit = self.window is not None or out_transform is not None
        if enable_gqa and (explicit or needs_whole_heads(q_BLNH)):
            k_BLNH, v_BLNH = (_without_gqa(x, q_BLNH.shape[2]) for x in (k_BLNH, v_BLNH))
            enable_gqa = False
        q, k, v = (_ToDense.apply(x[0], layout.to_dense_P, layout.to_packed_T) for x in (q_BLNH, k_BLNH, v_BLNH))
        dense, sums, slot = [], [], 0
        for num, padded in layout.buckets:
            rows = slice(slot, slot + num * padded)
            slot += num * padded
            qb, kb, vb = (x[rows].unflatten(0, (num, padded)).transpose(1, 2) for x in (q, k, v))
            if explicit:
                out, log_sum_exp = attend(qb, kb, vb, scale, self.window)
                sums.append(log_sum_exp.transpose(1, 2).flatten(0, 1))
            else:
                out = F.scaled_dot_product_attention(qb, kb, vb, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            dense.append(out.transpose(1, 2).flatten(0, 1))
        packed = _ToPacked.apply(torch.cat(dense), layout.to_packed_T)
        if out_transform is not None:
            packed = out_transform(packed, _ToPacked.apply(torch.cat(sums), layout.to_packed_T))
        return packed[None]


def attend(
    q_BNLH: torch.Tensor, k_BNLH: torch.Tensor, v_BNLH: torch.Tensor, scale: float | None, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention (B, N, L, H) in the dtype of the values, and the log-sum-exp of each query's scores (B, N, L) in
    float32. With a window a query attends to `window` positions, its own and those before it.

    The backward pass computes a block's scores again: only one block's are held.
    """
    scale = q_BNLH.shape[-1] ** -0.5 if scale is None else scale
    outs, sums, length = [], [], q_BNLH.shape[2]
    for first in range(0, length, _QUERIES_AT_ONCE):
        end = min(first + _QUERIES_AT_ONCE, length)
        start = 0 if window is None else max(0, first - window + 1)
        q, k, v = q_BNLH[:, :, first:end], k_BNLH[:, :, start:end], v_BNLH[:, :, start:end]
        out, log_sum_exp = checkpoint(
            _attend_block, q, k, v, scale, window, use_reentrant=False, preserve_rng_state=False
        )
        outs.append(out)
        sums.append(log_sum_exp)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _attend_block(q, k, v, scale: float, window: int | None):
    """Queries that are the last of the keys' positions."""
    num, num_keys = q.shape[2], k.shape[2]
    positions = torch.arange(num_keys, device=q.device)
    distance = positions[num_keys - num :, None] - positions
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    scores = (scale * q.float() @ k.float().transpose(-2, -1)).masked_fill(unseen, -torch.inf)
    return (scores.softmax(-1) @ v.float()).to(v.dtype), scores.logsumexp(-1)


def needs_whole_heads(query: torch.Tensor) -> bool:
    """Whether torch has no fused attention for query heads that share key and value heads: in float32 on CUDA.

    FlashAttention needs 16 bits, the memory-efficient kernel needs as many key heads as query heads, and the remaining
    kernel keeps a score for every pair of tokens."""
    return query.is_cuda and query.dtype == torch.float32

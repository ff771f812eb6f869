"""Training attention over packed documents that runs anywhere: dense batches of documents of similar lengths.

torchtitan's decoder hands its argument `attention_masks` to each layer's inner attention. `PackedSDPA` takes a
`PackedDocuments` there, the layout of packed tokens in a few dense, right-padded batches. Under a causal mask right
padding is invisible to real tokens, so no mask is needed. Plain causal attention is one scaled-dot-product call per
batch. Torch has no such call for sliding windows without a mask of all pairs, and none that gives the log-sum-exp with
its gradient, which sinks need: `attend` computes both by definition, a block of queries at a time.

Where siblings share their prompt (`model.shared_prefix`), the prompt's tokens are packed once, in the first sibling's
document. The keys of another sibling are those of the prompt and its own. Its queries are the last of these positions,
so that the same causal rule holds, with a mask for torch's call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torchtitan.models.common.attention import VarlenAttention, VarlenMetadata

from torchtitan_rl import adapters, platform
from torchtitan_rl.model.shared_prefix import MASKED_QUERIES

__all__ = ["PackedDocuments", "PackedSDPA", "SharedKeys", "attend", "needs_whole_heads", "varlen_metadata"]

adapters.adapt_torchtitan()

_MAX_PADDING = 1.25  # a bucket's longest document may be this much longer than its shortest, plus 8 tokens
_NO_PROMPT = (0, 0)
_QUERIES_AT_ONCE = 512  # `attend` holds the scores of so many queries of every document


class SharedKeys(NamedTuple):
    """Where the keys of packed documents lie in dense batches, of which some have a prompt in front that is packed in
    another document."""

    to_dense_K: torch.Tensor
    """For every slot of every bucket's keys, the packed token that fills it (token 0 in padding)."""
    to_packed_T: torch.Tensor
    """For every packed token, the slot of its key in the bucket of its own document."""
    prompts: tuple[tuple[int, int], ...]
    """For each bucket the first packed token and the number of tokens of the prompt in front; (0, 0): none."""


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
    shared: SharedKeys | None = None
    """Keys, where documents have a prompt in front that is packed in another document; None: keys lie as queries do."""

    @classmethod
    def build(
        cls, lengths: list[int], device: torch.device | str = "cpu", shared: list[int] | None = None
    ) -> PackedDocuments:
        """`lengths`: tokens of each document, in packed order. `shared`: how many tokens of each document are packed in
        another one, the last before it that has 0 here; None: every document has 0."""
        documents = torch.arange(sum(lengths)).split(lengths)
        by_prompt = {_NO_PROMPT: list(documents)} if shared is None else _by_prompt(documents, shared)
        pairs = [(prompt, bucket) for prompt, members in by_prompt.items() for bucket in _buckets(members)]
        prompts, buckets = tuple(prompt for prompt, _ in pairs), [bucket for _, bucket in pairs]
        to_dense, to_packed = _indices(buckets)
        keys = None
        if shared is not None:
            to_dense_K, to_key_T = _indices(buckets, prompts)
            keys = SharedKeys(_sent(to_dense_K, device), _sent(to_key_T, device), prompts)
        sizes = tuple((len(bucket), len(bucket[-1])) for bucket in buckets)
        return cls(_sent(to_dense, device), _sent(to_packed, device), sizes, tuple(lengths), keys)


def _by_prompt(documents: Sequence[torch.Tensor], shared: list[int]) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Documents by the prompt in front of them: (its first packed token, its tokens)."""
    by_prompt: dict[tuple[int, int], list[torch.Tensor]] = {}
    owner_start = 0  # of the last document that is packed whole
    for document, size in zip(documents, shared, strict=True):
        if not size:
            owner_start = int(document[0])
        by_prompt.setdefault((owner_start, size) if size else _NO_PROMPT, []).append(document)
    return by_prompt


def _sent(indices: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A copy on the device, which the host does not wait for."""
    return indices.to(device, non_blocking=True)


def _buckets(documents: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Documents, as indices of packed tokens, with others of about their length, shortest first."""
    documents, buckets = sorted(documents, key=len), []
    while documents:
        limit = int(len(documents[0]) * _MAX_PADDING) + 8
        num = next((i for i, document in enumerate(documents) if len(document) > limit), len(documents))
        buckets.append(documents[:num])
        documents = documents[num:]
    return buckets


def _indices(
    buckets: list[list[torch.Tensor]], prompts: Sequence[tuple[int, int]] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """For every slot the packed token that fills it, and for every packed token its slot; with `prompts`, of keys that
    have each bucket's prompt in front of every document."""
    to_dense: list[torch.Tensor] = []
    to_packed, slot = torch.empty(sum(len(d) for members in buckets for d in members), dtype=torch.long), 0
    for members, (first, size) in zip(buckets, prompts or [(0, 0)] * len(buckets), strict=True):
        in_front = torch.arange(first, first + size).expand(len(members), size)
        to_dense.append(torch.cat([in_front, pad_sequence(members, batch_first=True)], 1).flatten())
        for document in members:
            to_packed[document] = torch.arange(slot + size, slot + size + len(document))
            slot += size + len(members[-1])
    return torch.cat(to_dense), to_packed


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


class _ToKeys(torch.autograd.Function):
    """Packed (T, ...) to dense keys (K, ...). A token's gradient is that of its own slot and, in a prompt, of its
    copies in front of the documents that share the prompt."""

    @staticmethod
    def forward(ctx, packed, shared: SharedKeys, buckets):
        ctx.save_for_backward(shared.to_packed_T)
        ctx.prompts, ctx.buckets = shared.prompts, buckets
        return packed.index_select(0, shared.to_dense_K)

    @staticmethod
    def backward(ctx, grad):
        (to_packed_T,) = ctx.saved_tensors
        packed, slot = grad.index_select(0, to_packed_T), 0
        for (num, padded), (first, size) in zip(ctx.buckets, ctx.prompts, strict=True):
            rows = grad[slot : slot + num * (size + padded)]
            slot += len(rows)
            if size:
                packed[first : first + size] += rows.unflatten(0, (num, size + padded))[:, :size].sum(0)
        return packed, None, None


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
        layout, shared = attention_masks, attention_masks.shared
        explicit = self.window is not None or out_transform is not None
        if enable_gqa and (explicit or needs_whole_heads(q_BLNH)):
            k_BLNH, v_BLNH = (_without_gqa(x, q_BLNH.shape[2]) for x in (k_BLNH, v_BLNH))
            enable_gqa = False
        q = _ToDense.apply(q_BLNH[0], layout.to_dense_P, layout.to_packed_T)
        if shared is None:
            k, v = (_ToDense.apply(x[0], layout.to_dense_P, layout.to_packed_T) for x in (k_BLNH, v_BLNH))
        else:
            k, v = (_ToKeys.apply(x[0], shared, layout.buckets) for x in (k_BLNH, v_BLNH))
        if platform.attends_in_float32(q):
            q, k, v = q.float(), k.float(), v.float()
        dense, sums, slot, key_slot = [], [], 0, 0
        for bucket, (num, padded) in enumerate(layout.buckets):
            num_keys = padded if shared is None else shared.prompts[bucket][1] + padded
            rows, keys = slice(slot, slot + num * padded), slice(key_slot, key_slot + num * num_keys)
            slot, key_slot = rows.stop, keys.stop
            qb = q[rows].unflatten(0, (num, padded)).transpose(1, 2)
            kb, vb = (x[keys].unflatten(0, (num, num_keys)).transpose(1, 2) for x in (k, v))
            if explicit:
                out, log_sum_exp = attend(qb, kb, vb, scale, self.window)
                sums.append(log_sum_exp.transpose(1, 2).flatten(0, 1))
            elif num_keys > padded:
                out = _attend_after_prompt(qb, kb, vb, scale, enable_gqa)
            else:
                out = F.scaled_dot_product_attention(qb, kb, vb, is_causal=True, scale=scale, enable_gqa=enable_gqa)
            dense.append(out.to(q_BLNH.dtype).transpose(1, 2).flatten(0, 1))
        packed = _ToPacked.apply(torch.cat(dense), layout.to_packed_T)
        if out_transform is not None:
            packed = out_transform(packed, _ToPacked.apply(torch.cat(sums), layout.to_packed_T))
        return packed[None]


def attend(
    q_BNLH: torch.Tensor, k_BNLH: torch.Tensor, v_BNLH: torch.Tensor, scale: float | None, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention (B, N, L, H) in the dtype of the values, and the log-sum-exp of each query's scores (B, N, L) in
    float32. Queries are the last of the keys' positions. With a window a query attends to `window` positions, its own
    and those before it.

    The backward pass computes a block's scores again: only one block's are held.
    """
    scale = q_BNLH.shape[-1] ** -0.5 if scale is None else scale
    outs, sums, length = [], [], q_BNLH.shape[2]
    before = k_BNLH.shape[2] - length
    for first in range(0, length, _QUERIES_AT_ONCE):
        end = min(first + _QUERIES_AT_ONCE, length)
        start = 0 if window is None else max(0, before + first - window + 1)
        keys = slice(start, before + end)
        q, k, v = q_BNLH[:, :, first:end], k_BNLH[:, :, keys], v_BNLH[:, :, keys]
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


def _attend_after_prompt(q_BNLH, k_BNSH, v_BNSH, scale: float | None, enable_gqa: bool) -> torch.Tensor:
    """Causal attention (B, N, L, H) of queries that are the last L of the keys' S positions, by torch's call."""
    length, num_keys = q_BNLH.shape[2], k_BNSH.shape[2]
    rows = min(length, MASKED_QUERIES)
    # Of any block of queries, the last sees all of the block's keys, the one before it one key fewer, and so on.
    unseen = q_BNLH.new_full((rows, num_keys), -torch.inf).triu(num_keys - rows + 1)
    outs = []
    for first in range(0, length, rows):
        end = min(first + rows, length)
        seen = num_keys - length + end
        out = F.scaled_dot_product_attention(
            q_BNLH[:, :, first:end],
            k_BNSH[:, :, :seen],
            v_BNSH[:, :, :seen],
            attn_mask=unseen[rows - (end - first) :, num_keys - seen :],
            scale=scale,
            enable_gqa=enable_gqa,
        )
        outs.append(out)
    return torch.cat(outs, 2)


def varlen_metadata(lengths: list[int], device: torch.device | str) -> VarlenMetadata:
    """What torchtitan's `create_varlen_metadata_for_document` finds out from positions on the device, by two reads for
    which the host waits; the lengths of packed documents are known here."""
    ends_D = _sent(torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32), device)
    return VarlenMetadata(cu_seq_q=ends_D, cu_seq_k=ends_D, max_q=max(lengths), max_k=max(lengths))


def needs_whole_heads(query: torch.Tensor) -> bool:
    """Whether torch has no fused attention for query heads that share key and value heads: in float32 on CUDA.

    FlashAttention needs 16 bits, the memory-efficient kernel needs as many key heads as query heads, and the remaining
    kernel keeps a score for every pair of tokens."""
    return query.is_cuda and query.dtype == torch.float32

"""The gated delta rule (Yang et al. 2024, arXiv 2412.06464) and its convolution for packed documents, in torch alone;
and torchtitan's Qwen3.5 layers with both in the place of `fla`'s Triton kernels.

A head's state S (K x V) begins at 0 in every document. A token with query q, key k, value v, log-decay g <= 0 and rate
beta in (0, 1) replaces S by exp(g) S + beta k (v - exp(g) S^T k)^T; its output is the new S^T q. A chunk of C tokens is
one triangular system, and only the state between chunks is sequential (`gated_delta_rule`).

Shape letters: T packed tokens, H value heads, K key size, V value size, D channels, N chunks of C tokens, R requests or
documents.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchtitan_rl import adapters

adapters.adapt_torchtitan()

from torchtitan.models.common.attention import VarlenMetadata  # noqa: E402
from torchtitan.models.common.decoder import Decoder  # noqa: E402
from torchtitan.models.common.decoder_sharding import dense_sequence_parallel_placement, set_decoder_sharding_config  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402

with adapters.without_fla():
    from torchtitan.models.qwen3_5.model import GatedDeltaKernel, GatedDeltaNet, Qwen35Attention, Qwen35TransformerBlock
    from torchtitan.models.qwen3_5.sharding import _set_qwen35_layer_sharding

__all__ = [
    "Chunks",
    "DeltaNet",
    "DeltaKernel",
    "Qwen35Attention",
    "SequenceStates",
    "TextBlock",
    "TextModel",
    "causal_conv",
    "gated_delta_rule",
]

_LARGEST_CHUNK = 64
_NORM_EPS = 1e-6  # of `fla` and transformers, in the L2 norm of queries and keys


class Chunks(NamedTuple):
    """Where the tokens of packed documents lie in chunks of one size, and in a convolution's input."""

    size: int
    """C: a power of two."""
    slots_T: torch.Tensor
    """For every token its place in the chunks, flat. Step after step: the first chunks of all documents, longest
    document first, then the second chunks, and so on."""
    steps: tuple[int, ...]
    """Documents that have a chunk, by step; never growing. They add up to N."""
    order_R: torch.Tensor
    """Documents by falling number of chunks."""
    lengths: tuple[int, ...]

    @classmethod
    def build(cls, lengths: tuple[int, ...], device: torch.device) -> Chunks:
        """`lengths`: tokens of each document, in packed order. The same lengths give the same object."""
        return _chunks(lengths, str(device))

    def rows(self, history: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where each document has `history` rows in front: every token's row (T,), the rows in front (R, history), and
        the last rows of each document (R, history), which may be in front of it."""
        return _rows(self.lengths, history, str(self.slots_T.device))


@functools.lru_cache(maxsize=64)
def _chunks(lengths: tuple[int, ...], device: str) -> Chunks:
    size = min(_LARGEST_CHUNK, 1 << (max(lengths) - 1).bit_length()) if lengths else 1
    counts = torch.tensor([-(-length // size) for length in lengths])
    order = torch.argsort(counts, descending=True, stable=True)
    steps = tuple(int((counts > step).sum()) for step in range(int(counts.max())))
    first = torch.tensor([0, *steps]).cumsum(0)  # the first chunk of every step
    rank = torch.argsort(order)
    slots = []
    for index, length in enumerate(lengths):
        position = torch.arange(length)
        slots.append((first[position // size] + rank[index]) * size + position % size)
    slots_T = torch.cat(slots).to(device, non_blocking=True)
    return Chunks(size, slots_T, steps, order.to(device, non_blocking=True), lengths)


@functools.lru_cache(maxsize=64)
def _rows(lengths: tuple[int, ...], history: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths_R = torch.tensor(lengths)
    document_T = torch.repeat_interleave(lengths_R)
    ends_R, inside = (lengths_R + history).cumsum(0), torch.arange(history)
    tokens_T = torch.arange(len(document_T)) + (document_T + 1) * history
    front_RW = (ends_R - lengths_R - history)[:, None] + inside
    last_RW = (ends_R - history)[:, None] + inside
    indices = (tokens_T, front_RW, last_RW)
    return tuple(index.to(device, non_blocking=True) for index in indices)  # type: ignore[return-value]  # three


def causal_conv(
    x_TD: torch.Tensor, weight_DW: torch.Tensor, chunks: Chunks, history_RWD: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(SiLU of the convolution of each channel with W taps, each document's last W - 1 inputs for the next call), in
    the dtype of `x_TD` and computed in float32. A document begins after `history_RWD`, its last W - 1 inputs before
    this call; None: zeros."""
    taps = weight_DW.shape[1]
    rows_T, front_RW, last_RW = chunks.rows(taps - 1)
    x, weight = _precise(x_TD), _precise(weight_DW)
    stream = x.new_zeros((len(rows_T) + front_RW.numel(), x.shape[1])).index_copy(0, rows_T, x)
    if history_RWD is not None:
        stream = stream.index_copy(0, front_RW.flatten(), history_RWD.flatten(0, 1).to(x.dtype))
    padded = F.pad(stream, (0, 0, taps - 1, 0))
    out = padded[: len(stream)] * weight[:, 0]
    for tap in range(1, taps):
        out = out + padded[tap : tap + len(stream)] * weight[:, tap]
    return F.silu(out.index_select(0, rows_T)).to(x_TD.dtype), stream[last_RW].to(x_TD.dtype)


def gated_delta_rule(
    q_THK: torch.Tensor,
    k_THK: torch.Tensor,
    v_THV: torch.Tensor,
    g_TH: torch.Tensor,
    beta_TH: torch.Tensor,
    chunks: Chunks,
    state_RHKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs (T, H, V) in the dtype of the queries, each document's last state (R, H, K, V) in float32). A document
    begins with `state_RHKV`; None: zeros. Queries and keys are normalised here, and queries divided by sqrt(K).

    Within a chunk let G be the running sum of g. The values that the state takes in, u, solve the unit lower triangular
    system u_i + sum over j < i of beta_i exp(G_i - G_j) (k_i . k_j) u_j = beta_i (v_i - exp(G_i) S^T k_i) with S the
    state before the chunk; so u = U - W S for two solutions that do not know S.
    """
    dtype, size = q_THK.dtype, chunks.size
    q, k = _normalised(q_THK) * q_THK.shape[-1] ** -0.5, _normalised(k_THK)
    q, k, v, g, beta = (_to_chunks(_precise(x), chunks) for x in (q, k, v_THV, g_TH, beta_TH))
    # In float64: a fast head's sums reach a thousand, and what counts is the small difference of two of them.
    decay_NHC = g.double().cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = decay_NHC[..., :, None] - decay_NHC[..., None, :]
    between = between.masked_fill(later, float("-inf")).to(g.dtype).exp()
    since_last = (decay_NHC[..., -1:] - decay_NHC).to(g.dtype).exp()
    since_first = decay_NHC.to(g.dtype).exp()
    k_beta = k * beta[..., None]
    system = (k_beta @ k.transpose(-1, -2)) * between
    solved = torch.linalg.solve_triangular(
        system, torch.cat([v * beta[..., None], k_beta * since_first[..., None]], -1), upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.transpose(-1, -2)) * between
    q, k = q * since_first[..., None], k * since_last[..., None]
    last = since_first[..., -1, None, None]
    num = chunks.steps[0]
    if state_RHKV is None:
        state = v.new_zeros((num, v.shape[1], k.shape[-1], v.shape[-1]))
    else:
        state = _precise(state_RHKV).index_select(0, chunks.order_R)
    outputs, ended, start = [], [], 0
    for num in chunks.steps:
        at = slice(start, start + num)
        start += num
        ended.append(state[num:])
        state = state[:num]
        new = u[at] - w[at] @ state
        outputs.append(q[at] @ state + scores[at] @ new)
        state = state * last[at] + k[at].transpose(-1, -2) @ new
    ended.append(state)
    out = torch.cat(outputs).transpose(1, 2).flatten(0, 1).index_select(0, chunks.slots_T)
    return out.to(dtype), torch.cat(ended[::-1]).index_select(0, torch.argsort(chunks.order_R))


def _precise(x: torch.Tensor) -> torch.Tensor:
    """In float32, or in float64 as it came."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normalised(x: torch.Tensor) -> torch.Tensor:
    x = _precise(x)
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS)


def _to_chunks(x: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """(T, H, ...) in chunks (N, H, C, ...); what no token fills is 0 and changes no state."""
    empty = x.new_zeros((sum(chunks.steps) * chunks.size, *x.shape[1:]))
    return empty.index_copy(0, chunks.slots_T, x).unflatten(0, (-1, chunks.size)).transpose(1, 2)


class SequenceStates(Protocol):
    """What an engine keeps of each sequence between calls, for one layer."""

    def begin(self) -> tuple[int, ...] | None:
        """The tokens of each sequence in this call, which the others of this call's methods are about; None: nothing is
        to be computed."""

    def read(self, kind: int, columns: slice = slice(None)) -> torch.Tensor:
        """What was kept last, by sequence, zeros at its beginning: `_CONV` (R, W - 1, D) or `_STATE` (R, H, K, V)."""

    def keep(self, kind: int, values: torch.Tensor, columns: slice = slice(None)) -> None:
        """Keeps what the next call begins with."""


_CONV, _STATE = 0, 1


class DeltaKernel(GatedDeltaKernel):
    """The gated delta rule within each packed document, behind the interface of torchtitan's kernel."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatedDeltaKernel.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.states: SequenceStates | None = None
        """Those of the layer, where documents are parts of an engine's sequences."""

    def forward(self, xq_BLNK, xk_BLNK, xv_BLNV, g_BLN, beta_BLN, *, cu_seqlens=None, cu_seqlens_cpu=None):
        chunks, states = _chunks_of(cu_seqlens_cpu, xq_BLNK.device), self.states
        heads = xv_BLNV.shape[2] // xq_BLNK.shape[2]
        q, k = (x[0].repeat_interleave(heads, 1) for x in (xq_BLNK, xk_BLNK))
        before_RHKV = None if states is None else states.read(_STATE)
        out, after_RHKV = gated_delta_rule(q, k, xv_BLNV[0], g_BLN[0], beta_BLN[0], chunks, before_RHKV)
        if states is not None:
            states.keep(_STATE, after_RHKV)
        return out[None]


class DeltaNet(GatedDeltaNet):
    """torchtitan's gated delta net with a convolution in torch. `attention_masks` is what attention takes: the layout
    of packed documents (`model.attention.PackedDocuments`), torchtitan's metadata of variable lengths, or None where
    the layer has `states`, which know the lengths."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatedDeltaNet.Config):
        states: Module.Config | None = None
        """An engine's states of sequences; None: every document begins with zeros."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.states = self.kernel.states = None if config.states is None else config.states.build()
        keys, values = config.in_proj_k.out_features, config.in_proj_v.out_features
        self._columns = (slice(0, keys), slice(keys, 2 * keys), slice(2 * keys, 2 * keys + values))

    def forward(self, x_BLD: torch.Tensor, attention_masks=None) -> torch.Tensor:
        if isinstance(attention_masks, VarlenMetadata):
            return super().forward(x_BLD, attention_masks)
        lengths = attention_masks.lengths if self.states is None else self.states.begin()
        assert self.states is not None or attention_masks.shared is None, "a state begins at 0 in every document"
        if lengths is None:
            return torch.zeros_like(x_BLD)
        ends, longest = (0, *itertools.accumulate(lengths)), max(lengths)
        offsets = torch.tensor(ends, dtype=torch.int32)  # its shape alone is read: no copy to the device
        return super().forward(x_BLD, VarlenMetadata(offsets, offsets, longest, longest, ends))

    def _causal_conv(self, x_BLD, conv, cu_seqlens=None, cu_seqlens_cpu=None):
        columns = self._columns[[self.conv_q, self.conv_k, self.conv_v].index(conv)]

        def local(x_local_BLD: torch.Tensor, weight_local: torch.Tensor) -> torch.Tensor:
            chunks, states = _chunks_of(cu_seqlens_cpu, x_local_BLD.device), self.states
            before_RWD = None if states is None else states.read(_CONV, columns)
            out, after_RWD = causal_conv(x_local_BLD[0], weight_local[:, 0], chunks, before_RWD)
            if states is not None:
                states.keep(_CONV, after_RWD, columns)
            return out[None]

        if isinstance(x_BLD, DTensor):
            return self._local_map_conv(x_BLD, conv, local)
        return local(x_BLD, conv.weight)


def _chunks_of(ends: torch.Tensor, device: torch.device) -> Chunks:
    return Chunks.build(tuple(ends.diff().tolist()), device)


class TextBlock(Qwen35TransformerBlock):
    """A layer with attention or a delta net, which get the same layout of packed documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen35TransformerBlock.Config):
        pass

    def forward(self, x_BLD: torch.Tensor, attention_masks, positions: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x_BLD, {self.attn_mask_key: attention_masks}, positions)


class TextModel(Decoder):
    """The text part of Qwen3.5: torchtitan's layers without the vision encoder."""

    vision_encoder = None  # torchtitan's `parallelize_qwen3_5` asks

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        def update_from_config(self, *, config, **kwargs) -> None:
            """torchtitan's parallel plan of the layers, with sequence parallelism from the embedding on."""
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            set_decoder_sharding_config(self, enable_sp=True)
            layout = dense_sequence_parallel_placement()
            for layer in self.layers:
                layer.sharding_config = ShardingConfig(
                    in_src_shardings={"x_BLD": layout}, in_dst_shardings={"x_BLD": layout}, out_src_shardings=layout
                )
                _set_qwen35_layer_sharding(layer, attention_input_layout=layout, enable_ep=False)

    def forward(self, tokens, positions=None, attention_masks=None):
        if isinstance(attention_masks, VarlenMetadata):  # once for all layers: a copy from the device waits for it
            attention_masks = attention_masks._replace(cu_seq_q_host=tuple(attention_masks.cu_seq_q.tolist()))
        return super().forward(tokens, positions, attention_masks)

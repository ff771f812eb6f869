"""vLLM's kernels as the forward of torchtitan's modules in a generator.

The modules keep torchtitan's parameters and names. Their forwards call the operators of vLLM's own models, which take
a fraction of the time that several operators of torch take for the few rows of a decode step. No gradients.

A compiler gets norms and rotations in torch's operators, which it fuses with their neighbours, and calls the packed
products and attention as they are. CUDA has further kernels, which join what a CPU calls one by one:
`platform.has_fused_layers`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import FusedQKVLinear, GQAttention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
from torchtitan.protocols.module import Module
from vllm import _custom_ops as ops
from vllm.distributed import tensor_model_parallel_all_reduce

from torchtitan_rl import adapters, platform
from torchtitan_rl.families.rotations import AmplifiedCosSinRoPE
from torchtitan_rl.model.head_product import head_product

if TYPE_CHECKING:
    from torchtitan_rl.engine.layer_adapters import LayerAdapters

__all__ = [
    "KernelNorm",
    "KernelHalfRotation",
    "KernelPairRotation",
    "Float32Head",
    "KernelAttention",
    "PackedFeedForward",
    "PackedLinear",
    "SplitQKVLinear",
    "changed",
    "pack_matrices",
    "with_kernels",
]

adapters.adapt_torchtitan()


class KernelNorm(RMSNorm):
    """An RMS norm in one operator, computed in float32 and rounded once, as torch's."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x)
        x = x.contiguous()  # the kernel reads rows one after the other, whatever the strides
        out = torch.empty_like(x)
        ops.rms_norm(out, x, self.weight, self.eps)
        return out


class KernelHalfRotation(CosSinRoPE):
    """The rotary embedding that pairs dimension i with i + dim / 2, in one operator. `cache` is vLLM's table: cosines,
    then sines, one of each for a pair."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        amplitude: float = 1.0
        """Of `families.rotations.AmplifiedCosSinRoPE`."""

    def _precompute_cache(self) -> torch.Tensor:
        table = super()._precompute_cache() * self.config.amplitude
        cosines, sines = table.chunk(2, dim=-1)  # torchtitan's table has every number twice
        pairs = self.config.dim // 2
        return torch.cat([cosines[:, :pairs], sines[:, :pairs]], dim=-1)

    def forward(self, query, key, positions):
        return _rotated_heads(self, query, key, positions)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, head_dim: int):
        """Rotates the heads of (tokens, heads x head_dim), see `_rotated`."""
        return _rotated(query, key, positions, head_dim, self.cache, halves=True)


class KernelPairRotation(ComplexRoPE):
    """The rotary embedding that pairs dimension 2i with 2i + 1, in one operator. `cache` is vLLM's table, as that of
    `KernelHalfRotation`."""

    @dataclass(kw_only=True, slots=True)
    class Config(ComplexRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        turns = super()._precompute_cache()
        return torch.cat([turns.real, turns.imag], dim=-1)

    def forward(self, query, key, positions):
        return _rotated_heads(self, query, key, positions)

    def rotate(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, head_dim: int):
        """Rotates the heads of (tokens, heads x head_dim), see `_rotated`."""
        return _rotated(query, key, positions, head_dim, self.cache, halves=False)

    def rotate_apart(self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, head_dim: int):
        """The same for heads whose even dimensions stand before the odd ones, before and after the rotation. The
        operator reads such heads in vectors."""
        return _rotated(query, key, positions, head_dim, self.cache, halves=True)


def _rotated_heads(rotation: KernelHalfRotation | KernelPairRotation, query, key, positions):
    """torchtitan's interface: query and key (1, tokens, heads, head_dim), positions (1, tokens)."""
    flat = rotation.rotate(query[0].flatten(1), key[0].flatten(1), positions[0], query.shape[-1])
    return flat[0].view(query.shape), flat[1].view(key.shape)


def _rotated(query, key, positions, head_dim, table, *, halves):
    """Query and key, each (tokens, heads x head_dim), rotated in float32 as torchtitan rotates: float32 in place, other
    dtypes in a copy. `table` (positions, head_dim) has cosines, then sines."""
    if torch.compiler.is_compiling():
        cosines, sines = (part[:, None] for part in table[positions].chunk(2, dim=-1))
        turn = _turned_halves if halves else _turned_pairs
        return turn(query, head_dim, cosines, sines), turn(key, head_dim, cosines, sines)
    rotated_query, rotated_key = query.float(), key.float()
    ops.rotary_embedding(positions, rotated_query, rotated_key, head_dim, table, halves)
    return rotated_query.to(query.dtype), rotated_key.to(key.dtype)


def _turned_halves(flat: torch.Tensor, head_dim: int, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Heads (tokens, heads x head_dim), of which dimension i is paired with i + head_dim / 2, in torch's operators.
    Cosines and sines are (tokens, 1, head_dim / 2)."""
    first, second = flat.unflatten(-1, (-1, head_dim)).float().chunk(2, dim=-1)
    turned = first * cosines - second * sines, second * cosines + first * sines
    # Cast before they are joined: a compiler writes both halves in one pass then.
    return torch.cat([part.to(flat.dtype) for part in turned], dim=-1).flatten(1)


def _turned_pairs(flat: torch.Tensor, head_dim: int, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """As `_turned_halves`, of which dimension 2i is paired with 2i + 1."""
    first, second = flat.unflatten(-1, (-1, head_dim // 2, 2)).float().unbind(-1)
    turned = first * cosines - second * sines, second * cosines + first * sines
    return torch.stack([part.to(flat.dtype) for part in turned], dim=-1).flatten(1)


def _packed(matrix: torch.Tensor) -> Any:
    """A copy of a matrix (out, in), packed for `ops.onednn_mm`.

    In one thread, whatever the caller has: on processors without AVX-512 oneDNN's layout of a size depends on the
    number of threads. vLLM 0.32 keeps one product per size for all matrices of a process, which reads a matrix of
    another layout wrongly."""
    with platform.one_thread():
        return ops.create_onednn_mm(matrix.t())


class PackedLinear(Linear):
    """A linear layer that multiplies by a second copy of its matrix, packed for the CPU's matrix product. Where
    `platform.packs_matrices` says no, and before the first `pack`, it is torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        sums_ranks: bool = False
        """Whether the input features are split over tensor-parallel ranks. An all-reduce sums the ranks' outputs then,
        and the bias, which is whole on every rank, is added to the sum."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._sums_ranks = config.sums_ranks
        self._packed: Any = None
        self.adapters: LayerAdapters | None = None

    def pack(self) -> None:
        """Packs the matrix as it is now; call after every change of it."""
        self._packed = _packed(self.weight)

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """The matrix times the input, with adapters, without the bias."""
        return self._multiplied(input, None)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self._sums_ranks:
            return self._multiplied(input, self.bias)
        out = tensor_model_parallel_all_reduce(self.product(input))
        return out if self.bias is None else out + self.bias

    def _multiplied(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._packed is None:
            out = F.linear(input, self.weight, bias)
        else:
            out = ops.onednn_mm(self._packed, input, bias)
        if self.adapters is not None:
            self.adapters.add_to(out, input)
        return out


class Float32Head(Linear):
    """A head whose logits are float32 though its matrix is not. A CPU multiplies by a packed copy in float32."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self._packed: Any = None

    def pack(self) -> None:
        """Packs the matrix as it is now; call after every change of it."""
        self._packed = _packed(self.weight.float())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return head_product(input, self.weight, float32=True)
        return ops.onednn_mm(self._packed, input.float(), None)


class PackedFeedForward(FeedForward):
    """A feed-forward that multiplies its input once, by the packed rows of `w1` and then of `w3`. Neither has a bias,
    and neither has a packed copy of its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self._packed: Any = None
        self.adapters: LayerAdapters | None = None
        """Of `w1` and `w3`."""

    def pack(self) -> None:
        """Packs both matrices as they are now; call after every change of them."""
        self._packed = _packed(torch.cat([self.w1.weight, self.w3.weight]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            gate_and_up = ops.onednn_mm(self._packed, x, None)
        elif platform.has_fused_layers(x) and not torch.compiler.is_compiling():
            return self.w2(self._gated(x))
        elif self.adapters is not None:
            gate_and_up = torch.cat([self.w1(x), self.w3(x)], dim=-1)
        else:
            return super().forward(x)
        if self.adapters is not None:
            self.adapters.add_to(gate_and_up, x)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        """SiLU of `w1`'s product times `w3`'s, which both products have written side by side, in one operator."""
        hidden = len(self.w1.weight)
        gate_and_up = x.new_empty(*x.shape[:-1], 2 * hidden)
        for linear, columns in ((self.w1, gate_and_up[..., :hidden]), (self.w3, gate_and_up[..., hidden:])):
            torch.mm(x.flatten(0, -2), linear.weight.t(), out=columns.flatten(0, -2))
        if self.adapters is not None:
            self.adapters.add_to(gate_and_up, x)
        out = x.new_empty(*x.shape[:-1], hidden)
        torch.ops._C.silu_and_mul(out, gate_and_up)  # vLLM's, as its `SiluAndMul` calls it
        return out


class SplitQKVLinear(FusedQKVLinear):
    """The fused matrix of query, key and value. torchtitan's has the heads of a group of query heads together, so that
    its products have to be copied apart; the packed copy has all query rows before key and value rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(FusedQKVLinear.Config):
        pairs_apart: bool = False
        """Whether the packed copy has the even dimensions of each query and key head before the odd ones. Products of
        queries and keys stay the same, in another order of their sum."""

    def __init__(self, config: Config):
        super().__init__(config)
        self._packed: Any = None
        self._packed_bias: torch.Tensor | None = None
        self.adapters: LayerAdapters | None = None
        self._pairs_apart = config.pairs_apart
        self._sizes = [config.n_heads * config.head_dim, *[config.n_kv_heads * config.head_dim] * 2]

    @property
    def pairs_are_apart(self) -> bool:
        """Whether `flat` gives query and key heads with their even dimensions first."""
        return self._pairs_apart and self._packed is not None

    def pack(self) -> None:
        """Packs matrix and bias as they are now; call after every change of them."""
        self._packed = _packed(self._apart(self.wqkv.weight))
        self._packed_bias = None if self.wqkv.bias is None else self._apart(self.wqkv.bias)

    def adapter_rows(self, b: torch.Tensor) -> torch.Tensor:
        """The B (rows, rank) of an adapter of `wqkv`, its rows in the order in which the layer computes its output."""
        return b if self._packed is None else self._apart(b)

    def _apart(self, fused: torch.Tensor) -> torch.Tensor:
        """A copy of fused rows (groups x (query heads of a group, key, value) x head_dim, ...), query rows first."""
        groups = fused.unflatten(0, (-1, self.r_dim, self.head_dim))
        query, key, value = groups.split([self.heads_per_kv, 1, 1], dim=1)
        if self._pairs_apart:
            query, key = (part.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2, 3) for part in (query, key))
        return torch.cat([part.flatten(0, 2) for part in (query, key, value)])

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """Query, key and value of an input (tokens, dim) in one tensor: in the order of the fused matrix's rows or,
        where there is a packed copy, of that one's."""
        packed = self._packed is not None
        out = ops.onednn_mm(self._packed, input, self._packed_bias) if packed else self.wqkv(input)
        if self.adapters is not None:
            self.adapters.add_to(out, input)
        return out

    def flat(self, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, each (tokens, heads x head_dim), of an input (tokens, dim)."""
        out = self.product(input)
        if self._packed is not None:
            return out.split(self._sizes, dim=-1)
        groups = out.unflatten(-1, (-1, self.r_dim, self.head_dim))
        query, key, value = groups.split([self.heads_per_kv, 1, 1], dim=2)
        return query.flatten(1), key.flatten(1), value.flatten(1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """torchtitan's interface: (1, tokens, heads, head_dim) each."""
        query, key, value = (part.unflatten(-1, (-1, self.head_dim))[None] for part in self.flat(x[0]))
        return query, key, value


class KernelAttention(GQAttention):
    """Grouped-query attention whose heads stay flat, (tokens, heads x head_dim), from the first product to the last.
    Its parts are a `SplitQKVLinear`, a kernel's rotation and `PagedAttention`."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(self, x_BLD, attention_masks, positions):
        if platform.has_fused_layers(x_BLD) and self._norms_are_plain and not torch.compiler.is_compiling():
            query, key, value = self._fused(x_BLD[0], positions[0])
        else:
            query, key, value = self.qkv_linear.flat(x_BLD[0])
            if self.q_norm is not None:
                # Views, as query and key are parts of one product: a compiler makes slow loops of a reshape of those.
                query = self.q_norm(query.unflatten(-1, (-1, self.head_dim))).flatten(1)
                key = self.k_norm(key.unflatten(-1, (-1, self.head_dim))).flatten(1)
            rotate = self.rope.rotate_apart if self.qkv_linear.pairs_are_apart else self.rope.rotate
            query, key = rotate(query, key, positions[0], self.head_dim)
        return self.wo(self.inner_attention.attention(query, key, value))[None]  # `PagedAttention`'s, from vLLM

    @property
    def _norms_are_plain(self) -> bool:
        return self.q_norm is None or type(self.q_norm) in (RMSNorm, KernelNorm)

    def _fused(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value of an input (tokens, dim), normed and rotated in one kernel after the product."""
        from torchtitan_rl.engine.fused_heads import fused_heads  # Triton need not be there on a CPU

        norms = None
        if self.q_norm is not None:
            norms = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        return fused_heads(
            self.qkv_linear.product(x),
            self.rope.cache,
            positions,
            head_dim=self.head_dim,
            queries_per_key=self.qkv_linear.heads_per_kv,
            halves=isinstance(self.rope, KernelHalfRotation),
            norms=norms,
        )


_NORM_MULTIPLE = 8
"""Sizes of which vLLM's norm on a CPU takes multiples alone: the numbers of one vector instruction."""

_KERNELS: dict[type[Module.Config], type[Module.Config]] = {
    RMSNorm.Config: KernelNorm.Config,
    CosSinRoPE.Config: KernelHalfRotation.Config,
    AmplifiedCosSinRoPE.Config: KernelHalfRotation.Config,
    ComplexRoPE.Config: KernelPairRotation.Config,
    Linear.Config: PackedLinear.Config,
}


def with_kernels(config: Any) -> Any:
    """A copy of a config in which every module of a class that has kernels is the kernels' subclass. Subclasses with a
    forward of their own stay, with their parts replaced."""
    if isinstance(config, list | tuple):
        return type(config)(with_kernels(part) for part in config)
    if not isinstance(config, Module.Config):
        return config
    if type(config) is FusedQKVLinear.Config:
        return changed(config, SplitQKVLinear.Config)  # which packs its matrix itself
    if type(config) is RMSNorm.Config and config.normalized_shape % _NORM_MULTIPLE:
        return config
    if type(config) is FeedForward.Config and all(
        type(w) is Linear.Config and not w.bias for w in (config.w1, config.w3)
    ):
        return changed(config, PackedFeedForward.Config, w2=with_kernels(config.w2))
    parts = {f.name: with_kernels(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}
    kernels = _KERNELS.get(type(config), type(config))
    if type(config) is GQAttention.Config and _stays_flat(parts):
        kernels = KernelAttention.Config
        if isinstance(parts["rope"], KernelPairRotation.Config) and parts["qk_norm"] is None:
            parts["qkv_linear"] = dataclasses.replace(parts["qkv_linear"], pairs_apart=True)
    return changed(config, kernels, **parts)


def _stays_flat(parts: dict[str, Any]) -> bool:
    """Whether the parts of grouped-query attention are those that `KernelAttention` calls."""
    rotates = isinstance(parts["rope"], KernelHalfRotation.Config | KernelPairRotation.Config)
    return rotates and isinstance(parts["qkv_linear"], SplitQKVLinear.Config)


def changed(config: Module.Config, config_class: type[Module.Config], **changes: Any) -> Module.Config:
    """A copy of a config, of its class or of one that has all its fields and requires no other."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.init}
    return config_class(**fields | changes)


def pack_matrices(model: torch.nn.Module) -> None:
    """Packs the matrices of a model whose parameters have changed, where the platform packs matrices of their dtype."""
    if not ops._supports_onednn:  # a build without oneDNN multiplies by plain matrices
        return
    dtype = next(parameter.dtype for parameter in model.parameters())
    layers: list[PackedLinear | PackedFeedForward | SplitQKVLinear | Float32Head] = []
    if platform.packs_matrices(dtype):
        packing = PackedLinear | PackedFeedForward | SplitQKVLinear
        layers += [module for module in model.modules() if isinstance(module, packing)]
    if platform.packs_matrices(torch.float32):
        layers += [module for module in model.modules() if isinstance(module, Float32Head)]
    layers.sort(key=lambda layer: -sum(parameter.numel() for parameter in layer.parameters()))
    platform.in_threads(lambda layer: layer.pack(), layers)

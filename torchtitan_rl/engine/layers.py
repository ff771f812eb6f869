"""vLLM's attention and cache in a generator rank's model, and the rule that cuts whole weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.protocols.module import Module
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from torchtitan_rl import adapters
from torchtitan_rl.model.generator_cut import RankPart, cut_dim

__all__ = ["PagedAttention", "PagedSinkAttention", "StateCache", "shard_for_rank", "state_dtypes"]

adapters.adapt_torchtitan()


class PagedAttention(Module):
    """vLLM's attention (paged KV cache, continuous batching) behind torchtitan's inner-attention interface."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer: int
        n_heads: int
        n_kv_heads: int
        head_dim: int
        window: int | None = None
        """Positions that a query attends to, its own included; None: all before it."""
        has_sinks: bool = False

        @property
        def name(self) -> str:
            """vLLM's name of the layer."""
            return f"layers.{self.layer}.attention"

    def __init__(self, config: Config):
        super().__init__()
        from vllm.config import get_current_vllm_config

        vllm_config = get_current_vllm_config()
        self.sinks = nn.Parameter(torch.empty(config.n_heads), requires_grad=False) if config.has_sinks else None
        self.attention = Attention(
            config.n_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=config.n_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=None,
            prefix=config.name,
            per_layer_sliding_window=config.window,
            **({} if self.sinks is None else {"sinks": self.sinks}),  # some backends have no such argument
        )

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, out_transform=None, **kwargs):
        """Values may have fewer dimensions than keys: the cache holds both at the size of keys."""
        assert (out_transform is None) == (self.sinks is None), "vLLM's kernel applies sinks, and nothing else"
        if self.sinks is not None and self.attention.impl.sinks is not self.sinks:
            raise RuntimeError(
                f"generator: vLLM's {type(self.attention.impl).__name__} copied the sinks of attention, and new "
                "weights would not reach the copy; choose another attention backend of vLLM"
            )
        missing = k_BLNH.shape[-1] - v_BLNH.shape[-1]
        if missing:
            v_BLNH = F.pad(v_BLNH, (0, missing))
        out = self.attention(q_BLNH[0].flatten(1), k_BLNH[0].flatten(1), v_BLNH[0].flatten(1)).view(q_BLNH.shape)
        return out[..., :-missing] if missing else out


class PagedSinkAttention(GptOssAttention):
    """torchtitan's attention with sinks, which vLLM's kernel applies. `PagedAttention` scales the softmax itself."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssAttention.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.sinks = self.inner_attention.sinks


class _RequestLengths:
    """How many tokens each request has in the forward that runs. The first layer that asks reads them from the device;
    every layer of a forward has the same."""

    def __init__(self) -> None:
        self._context: ForwardContext | None = None
        self._lengths: tuple[int, ...] = ()

    def of(self, context: ForwardContext, lengths_R: torch.Tensor) -> tuple[int, ...]:
        if context is not self._context:
            self._context, self._lengths = context, tuple(lengths_R.tolist())
        return self._lengths


_LENGTHS = _RequestLengths()


class StateCache(Module, MambaBase):
    """What a layer with a state keeps of each request, in vLLM's cache (`families.delta_net.SequenceStates`).

    A request has one place, a block of the cache, for as long as it is in the engine."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer: int
        sizes: tuple[tuple[int, ...], ...]
        """Of the tensors of one request on this rank: the first in the model's dtype, further ones in float32."""

    def __init__(self, config: Config):
        super().__init__()
        from vllm.config import get_current_vllm_config

        vllm_config = get_current_vllm_config()
        self.config, self.model_dtype = config, vllm_config.model_config.dtype
        self.prefix = f"layers.{config.layer}.delta_net"
        self.kv_cache: tuple[torch.Tensor, ...] = ()
        vllm_config.compilation_config.static_forward_context[self.prefix] = self

    # vLLM's side.

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.config.sizes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return state_dtypes(self.config.sizes, self.model_dtype)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        """vLLM's plainest account of requests with states: where their tokens end, and their places."""
        return MambaAttentionBackendEnum.LINEAR

    # The model's side.

    def begin(self) -> tuple[int, ...] | None:
        """None while vLLM measures a call's memory, before there is a cache."""
        context = get_forward_context()
        if context.attn_metadata is None:
            return None
        metadata = context.attn_metadata[self.prefix]
        lengths_R = metadata.query_start_loc.diff()
        self._places_R, self._begins_R = metadata.state_indices_tensor, metadata.seq_lens == lengths_R
        return _LENGTHS.of(context, lengths_R)

    def read(self, kind: int, columns: slice = slice(None)) -> torch.Tensor:
        values = self.kv_cache[kind][..., columns][self._places_R]
        values[self._begins_R] = 0
        return values

    def keep(self, kind: int, values: torch.Tensor, columns: slice = slice(None)) -> None:
        self.kv_cache[kind][..., columns][self._places_R] = values


def state_dtypes(sizes: tuple[tuple[int, ...], ...], model_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of a request's tensors in `StateCache`."""
    return model_dtype, *(torch.float32 for _ in sizes[1:])


def shard_for_rank(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """This rank's part of an unsharded parameter, by torchtitan's name (`...wq.weight`); a `RankPart` as it is."""
    dim = None if size == 1 or isinstance(tensor, RankPart) else cut_dim(name)
    return tensor if dim is None else tensor.chunk(size, dim)[rank]

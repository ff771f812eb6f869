"""vLLM's attention in place of torchtitan's in a generator rank's model, and the rule that cuts whole weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchtitan.protocols.module import Module
from vllm.model_executor.layers.attention import Attention

from torchtitan_rl import adapters
from torchtitan_rl.model.generator_cut import RankPart, cut_dim

__all__ = ["PagedAttention", "shard_for_rank"]

adapters.adapt_torchtitan()


class PagedAttention(Module):
    """vLLM's attention (paged KV cache, continuous batching) behind torchtitan's inner-attention interface."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layer: int
        n_heads: int
        n_kv_heads: int
        head_dim: int

    def __init__(self, config: Config):
        super().__init__()
        from vllm.config import get_current_vllm_config

        vllm_config = get_current_vllm_config()
        self.attention = Attention(
            config.n_heads,
            config.head_dim,
            config.head_dim**-0.5,
            num_kv_heads=config.n_kv_heads,
            cache_config=vllm_config.cache_config,
            quant_config=None,
            prefix=f"layers.{config.layer}.attention",
        )

    def forward(self, q_BLNH, k_BLNH, v_BLNH, **kwargs):
        out = self.attention(q_BLNH[0].flatten(1), k_BLNH[0].flatten(1), v_BLNH[0].flatten(1))
        return out.view(q_BLNH.shape)


def shard_for_rank(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """This rank's part of an unsharded parameter, by torchtitan's name (`...wq.weight`); a `RankPart` as it is."""
    dim = None if size == 1 or isinstance(tensor, RankPart) else cut_dim(name)
    return tensor if dim is None else tensor.chunk(size, dim)[rank]

"""torchtitan's config classes put together for decoders of any size, as several families use them.

Weights are drawn from a normal distribution with a standard deviation of 0.02; norms begin at 1, biases at 0.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch.nn as nn

from torchtitan_rl import adapters

adapters.adapt_torchtitan()

from torchtitan.models.common import Embedding, Linear, RoPE  # noqa: E402
from torchtitan.models.common.attention import GQAttention  # noqa: E402
from torchtitan.models.common.config_utils import (  # noqa: E402
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.moe import MoE  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402

from torchtitan_rl.families.decoder import DecoderShape, ExpertsShape  # noqa: E402

__all__ = ["NORMAL", "norm", "tables", "attention", "feed_forward", "mixture"]

NORMAL = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}


def norm(size: int, eps: float) -> RMSNorm.Config:
    """An RMS norm over the last dimension."""
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init={"weight": nn.init.ones_})


def tables(shape: DecoderShape) -> dict[str, Any]:
    """The fields of a torchtitan decoder's config besides its layers: sizes, embedding, last norm and head."""
    return dict(
        vocab_size=shape.vocab_size,
        dim=shape.dim,
        norm=norm(shape.dim, shape.norm_eps),
        enable_weight_tying=shape.tie_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size,
            embedding_dim=shape.dim,
            param_init={"weight": skip_param_init if shape.tie_embeddings else NORMAL["weight"]},
        ),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=NORMAL),
    )


def attention(
    shape: DecoderShape, rope: RoPE.Config, *, head_norms: bool = False, biases: bool = False
) -> GQAttention.Config:
    """Grouped-query attention with one fused matrix for query, key and value. `head_norms`: norms of each query and key
    head; `biases`: of query, key and value."""
    config = make_gqa_config(
        dim=shape.dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        wqkv_param_init=NORMAL,
        wo_param_init=NORMAL,
        inner_attention=get_attention_config("varlen"),
        fuse_qkv=True,
        rope=rope,
        qk_norm=norm(shape.head_dim, shape.norm_eps) if head_norms else None,
    )
    config.qkv_linear.wqkv = dataclasses.replace(config.qkv_linear.wqkv, bias=biases)
    return config


def feed_forward(shape: DecoderShape) -> FeedForward.Config:
    """A dense gated feed-forward."""
    return make_ffn_config(dim=shape.dim, hidden_dim=shape.hidden_dim, w1_param_init=NORMAL, w2w3_param_init=NORMAL)


def mixture(shape: DecoderShape, experts: ExpertsShape) -> MoE.Config:
    """A mixture of experts in place of the feed-forward, whose router normalises the scores of the chosen experts."""
    return make_moe_config(
        num_experts=experts.num_experts,
        load_balance_coeff=experts.load_balance_coeff,
        router=make_router_config(
            dim=shape.dim,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            gate_param_init=NORMAL,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=make_routed_experts_config(
            dim=shape.dim,
            hidden_dim=shape.hidden_dim,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), NORMAL["weight"]),
            comm_backend="standard",
        ),
    )

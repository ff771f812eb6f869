"""Config classes put together for layers with biases everywhere, with sinks, windows and a clamped activation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from torchtitan_rl import adapters

adapters.adapt_torchtitan()

from torchtitan.models.common import RoPE  # noqa: E402
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear  # noqa: E402
from torchtitan.models.common.moe import MoE  # noqa: E402
from torchtitan.models.gpt_oss.model import Attention  # noqa: E402
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward  # noqa: E402

from torchtitan_rl.families import blocks  # noqa: E402
from torchtitan_rl.families.blocks import NORMAL  # noqa: E402
from torchtitan_rl.families.decoder import DecoderShape, ExpertsShape  # noqa: E402

__all__ = ["SinkAttention", "RowwiseLinear", "attention", "mixture"]


class SinkAttention(Attention):
    """torchtitan's attention with sinks. YaRN's growth of queries and keys is in the rotary embedding here, as in the
    other families; torchtitan has its square in the softmax's scale. Generators run `engine.layers.PagedSinkAttention`
    in its place."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.softmax_scale = self.head_dim**-0.5


class RowwiseLinear(ScaledBiasRowwiseLinear):
    """A linear layer whose input features tensor-parallel ranks share: each adds its share of the bias, and the bias's
    gradient is whole. In torchtitan's class the gradient is divided by the number of ranks too."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = (p.to_local() if isinstance(p, DTensor) else p for p in (self.weight, self.bias))
        return F.linear(input, weight, ScaleBiasForward.apply(bias, self.tp_degree, bias.dtype))


def attention(shape: DecoderShape, rope: RoPE.Config, window: int | None) -> SinkAttention.Config:
    """Grouped-query attention with sinks and biases. With `window` a query attends to so many positions, its own and
    those before it; None: to all positions before."""
    plain = blocks.attention(shape, rope, biases=True)
    heads = shape.n_heads * shape.head_dim
    inner = plain.inner_attention
    return SinkAttention.Config(
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        dim=shape.dim,
        qkv_linear=plain.qkv_linear,
        wo=RowwiseLinear.Config(in_features=heads, out_features=shape.dim, bias=True, param_init=NORMAL),
        sliding_window_size=window,
        inner_attention=inner if window is None else dataclasses.replace(inner, window_size=(window - 1, 0)),
        param_init={"sinks": NORMAL["weight"]},
        rope=rope,
    )


def mixture(shape: DecoderShape, experts: ExpertsShape, swiglu_limit: float) -> MoE.Config:
    """A mixture whose experts and router have biases."""
    moe = blocks.mixture(shape, experts)
    moe.router.gate = dataclasses.replace(moe.router.gate, bias=True)
    moe.routed_experts.inner_experts = GptOssGroupedExperts.Config(
        dim=shape.dim,
        hidden_dim=shape.hidden_dim,
        num_experts=experts.num_experts,
        swiglu_limit=swiglu_limit,
        param_init={
            "mlp1_weight_EGD": NORMAL["weight"],
            "mlp1_bias_EG": NORMAL["bias"],
            "mlp2_weight_EDF": NORMAL["weight"],
            "mlp2_bias_ED": NORMAL["bias"],
        },
    )
    return moe

"""The generator's parallel plan: torchtitan's blocks with one rank's share of heads and features.

No DTensor and no sequence parallelism, so any number of scheduled tokens works, odd numbers included. Column
weights are cut along dim 0; row weights are cut along dim 1 and followed by vLLM's all-reduce. Embedding, head and
norms are whole on every rank. Every rank has a share of every expert's inner features. The router is whole, so all
ranks send a token to the same experts.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.engine.layers import PagedAttention, StateCache
from torchtitan_rl.engine.slices import RowParallelLinear, SlicedExperts

__all__ = ["generator_spec", "whole_parameters"]


def generator_spec(spec: ModelSpec, tensor_parallel_degree: int) -> ModelSpec:
    """A new spec for one generator rank; `spec` stays unchanged.

    Raises ValueError unless the degree divides attention heads, KV heads and the feed-forward size.
    """
    tp = tensor_parallel_degree
    model = copy.deepcopy(spec.model)
    for index, layer in enumerate(model.layers):
        ffn, moe = layer.feed_forward, layer.moe
        if layer.attention is not None:
            layer.attention = _attention(layer.attention, index, tp)
        if getattr(layer, "delta_net", None) is not None:
            layer.delta_net = _delta_net(layer.delta_net, index, tp)
        hidden = ffn.w1.out_features if moe is None else moe.routed_experts.inner_experts.hidden_dim
        _check_divides(tp, hidden_dim=hidden)
        if moe is None:
            layer.feed_forward = dataclasses.replace(
                ffn,
                w1=dataclasses.replace(ffn.w1, out_features=hidden // tp),
                w3=dataclasses.replace(ffn.w3, out_features=hidden // tp),
                w2=_row_parallel(ffn.w2, tp),
            )
        elif tp > 1:
            routed = moe.routed_experts
            layer.moe = dataclasses.replace(
                moe,
                routed_experts=SlicedExperts.Config(
                    inner_experts=dataclasses.replace(routed.inner_experts, hidden_dim=hidden // tp),
                    token_dispatcher=routed.token_dispatcher,
                ),
            )
    return dataclasses.replace(spec, model=model)


def _attention(attention, index: int, tp: int):
    """One rank's heads, over vLLM's cache of keys and values."""
    _check_divides(tp, n_heads=attention.n_heads, n_kv_heads=attention.n_kv_heads)
    n_heads, n_kv_heads = attention.n_heads // tp, attention.n_kv_heads // tp
    if hasattr(attention, "qkv_linear"):
        qkv = attention.qkv_linear
        linears = {
            "qkv_linear": dataclasses.replace(
                qkv, n_heads=n_heads, n_kv_heads=n_kv_heads, wqkv=_column_parallel(qkv.wqkv, tp)
            )
        }
    else:
        linears = {name: _column_parallel(getattr(attention, name), tp) for name in ("wq", "wk", "wv")}
    return dataclasses.replace(
        attention,
        **linears,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        wo=_row_parallel(attention.wo, tp),
        inner_attention=PagedAttention.Config(
            layer=index, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=attention.head_dim
        ),
    )


def _delta_net(delta_net, index: int, tp: int):
    """One rank's heads, over vLLM's cache of states."""
    keys, values = delta_net.in_proj_k.out_features, delta_net.in_proj_v.out_features
    n_value_heads = values // delta_net.value_head_dim
    _check_divides(tp, n_key_heads=keys // delta_net.key_head_dim, n_value_heads=n_value_heads)
    linears = {f"in_proj_{part}": _column_parallel(getattr(delta_net, f"in_proj_{part}"), tp) for part in "qkvzab"}
    convolutions = {}
    for name in ("conv_q", "conv_k", "conv_v"):
        conv = getattr(delta_net, name)
        channels = conv.out_channels // tp
        convolutions[name] = dataclasses.replace(conv, in_channels=channels, out_channels=channels, groups=channels)
    return dataclasses.replace(
        delta_net,
        **linears,
        **convolutions,
        out_proj=_row_parallel(delta_net.out_proj, tp),
        states=StateCache.Config(
            layer=index,
            sizes=(
                (delta_net.conv_kernel_size - 1, (2 * keys + values) // tp),
                (n_value_heads // tp, delta_net.key_head_dim, delta_net.value_head_dim),
            ),
        ),
    )


def _check_divides(tp: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size % tp:
            raise ValueError(f"generator.tensor_parallel_degree={tp}: must divide the model's {name}={size}")


def _column_parallel(config: Linear.Config, tp: int) -> Linear.Config:
    return dataclasses.replace(config, out_features=config.out_features // tp)


def _row_parallel(config: Linear.Config, tp: int) -> Linear.Config:
    if tp == 1:
        return config
    return RowParallelLinear.Config(
        in_features=config.in_features // tp,
        out_features=config.out_features,
        bias=config.bias,
        param_init=config.param_init,
    )


def whole_parameters(spec: ModelSpec, dtype: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of an unsharded model by torchtitan's name; parameters are in `dtype`."""
    with torch.device("meta"):
        whole = spec.model.build()
    buffers = {name for name, _ in whole.named_buffers()}
    return {
        name: (tuple(tensor.shape), tensor.dtype if name in buffers else getattr(torch, dtype))
        for name, tensor in whole.state_dict().items()
    }

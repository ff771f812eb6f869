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
from torchtitan.protocols.module import Module

from torchtitan_rl.engine.layers import PagedAttention, PagedSinkAttention
from torchtitan_rl.engine.slices import RowParallelLinear, SlicedExperts
from torchtitan_rl.families.biased_blocks import SinkAttention
from torchtitan_rl.model.experts import BiasedExperts

__all__ = ["generator_spec", "whole_parameters"]


def generator_spec(spec: ModelSpec, tensor_parallel_degree: int) -> ModelSpec:
    """A new spec for one generator rank; `spec` stays unchanged.

    Raises ValueError unless the degree divides attention heads, KV heads and the feed-forward size.
    """
    tp = tensor_parallel_degree
    model = copy.deepcopy(spec.model)
    for index, layer in enumerate(model.layers):
        attention, ffn, moe = layer.attention, layer.feed_forward, layer.moe
        hidden = ffn.w1.out_features if moe is None else moe.routed_experts.inner_experts.hidden_dim
        for name, size in (
            ("n_heads", attention.n_heads),
            ("n_kv_heads", attention.n_kv_heads),
            ("hidden_dim", hidden),
        ):
            if size % tp:
                raise ValueError(f"generator.tensor_parallel_degree={tp}: must divide the model's {name}={size}")
        n_heads, n_kv_heads = attention.n_heads // tp, attention.n_kv_heads // tp
        qkv, (before, _) = attention.qkv_linear, attention.inner_attention.window_size
        has_sinks = isinstance(attention, SinkAttention.Config)
        layer.attention = _changed(
            attention,
            PagedSinkAttention.Config if has_sinks else type(attention),
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            qkv_linear=dataclasses.replace(
                qkv,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                wqkv=dataclasses.replace(qkv.wqkv, out_features=qkv.wqkv.out_features // tp),
            ),
            wo=_row_parallel(attention.wo, tp),
            inner_attention=PagedAttention.Config(
                layer=index,
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_dim=attention.head_dim,
                window=None if before == -1 else before + 1,
                has_sinks=has_sinks,
            ),
        )
        if moe is None:
            layer.feed_forward = dataclasses.replace(
                ffn,
                w1=dataclasses.replace(ffn.w1, out_features=hidden // tp),
                w3=dataclasses.replace(ffn.w3, out_features=hidden // tp),
                w2=_row_parallel(ffn.w2, tp),
            )
        elif tp > 1:
            routed = moe.routed_experts
            inner = dataclasses.replace(routed.inner_experts, hidden_dim=hidden // tp)
            if isinstance(inner, BiasedExperts.Config):
                inner.num_parts = tp
            layer.moe = dataclasses.replace(
                moe, routed_experts=SlicedExperts.Config(inner_experts=inner, token_dispatcher=routed.token_dispatcher)
            )
    return dataclasses.replace(spec, model=model)


def _changed(config: Module.Config, config_class: type[Module.Config], **changes) -> Module.Config:
    """A copy of a config, of its class or of a subclass without fields of its own."""
    return config_class(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)} | changes)


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

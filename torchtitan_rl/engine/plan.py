"""The generator's parallel plan: torchtitan's blocks with one rank's share of heads and features.

No DTensor and no sequence parallelism, so any number of scheduled tokens works, odd numbers included. Column
weights are cut along dim 0; row weights are cut along dim 1 and followed by vLLM's all-reduce. Embedding, head and
norms are whole on every rank. Every rank has a share of every expert's inner features. The router is whole, so all
ranks send a token to the same experts. vLLM's kernels then take the place of several operators (`kernels`).
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.engine.kernels import Float32Head, PackedLinear, changed, with_kernels
from torchtitan_rl.engine.layers import PagedAttention, PagedSinkAttention, StateCache
from torchtitan_rl.engine.routing_record import RecordingRouter, RoutingRecord
from torchtitan_rl.engine.slices import SlicedExperts
from torchtitan_rl.families.biased_blocks import SinkAttention
from torchtitan_rl.families.delta_net import DeltaNet, Qwen35Attention
from torchtitan_rl.model.experts import BiasedExperts, ExpertRouter
from torchtitan_rl.model.lora import is_adapter, lora_spec

__all__ = ["adapted_layers", "generator_spec", "whole_adapters", "whole_parameters"]


def generator_spec(
    spec: ModelSpec, tensor_parallel_degree: int, record: RoutingRecord | None = None, *, float32_head: bool = False
) -> ModelSpec:
    """A new spec for one generator rank; `spec` stays unchanged. With a record the routers write their choices to it.
    `float32_head`: see `ModelConfig`.

    Raises ValueError unless the degree divides attention heads, KV heads, the heads of delta nets and the feed-forward
    size, and for a family's own router where a record is asked for.
    """
    tp = tensor_parallel_degree
    model = copy.deepcopy(spec.model)
    for index, layer in enumerate(model.layers):
        if layer.attention is None:
            layer.delta_net = _delta_net(layer.delta_net, index, tp)
        elif isinstance(layer.attention, LatentAttention.Config):
            layer.attention = _latent_attention(layer.attention, index, tp)
        elif isinstance(layer.attention, Qwen35Attention.Config):
            layer.attention = _gated_attention(layer.attention, index, tp)
        elif isinstance(layer.attention, (GQAttention.Config, SinkAttention.Config)):
            layer.attention = _grouped_attention(layer.attention, index, tp)
        else:
            raise ValueError(
                f"model.shape: the attention of layer {index} is a {type(layer.attention).__qualname__}, which the "
                "generator cannot cut; make it a subclass of torchtitan's GQAttention (docs/families.md)"
            )
        if layer.moe is None:
            layer.feed_forward = _feed_forward(layer.feed_forward, tp)
        elif tp > 1:
            layer.moe = _mixture(layer.moe, tp)
    if record is not None:
        _record_routing(model.layers, record)
    if float32_head:
        model.lm_head = changed(model.lm_head, Float32Head.Config)
    return dataclasses.replace(spec, model=with_kernels(model))


def _share(name: str, size: int, tp: int) -> int:
    """One rank's part of a size of the model."""
    if size % tp:
        raise ValueError(f"generator.tensor_parallel_degree={tp}: must divide the model's {name}={size}")
    return size // tp


def _grouped_attention(attention: GQAttention.Config, layer: int, tp: int) -> GQAttention.Config:
    n_heads, n_kv_heads = _share("n_heads", attention.n_heads, tp), _share("n_kv_heads", attention.n_kv_heads, tp)
    qkv, (before, _) = attention.qkv_linear, attention.inner_attention.window_size
    has_sinks = isinstance(attention, SinkAttention.Config)
    return changed(
        attention,
        PagedSinkAttention.Config if has_sinks else type(attention),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        qkv_linear=dataclasses.replace(
            qkv, n_heads=n_heads, n_kv_heads=n_kv_heads, wqkv=_column_parallel(qkv.wqkv, tp)
        ),
        wo=_row_parallel(attention.wo, tp),
        inner_attention=PagedAttention.Config(
            layer=layer,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=attention.head_dim,
            window=None if before == -1 else before + 1,
            has_sinks=has_sinks,
        ),
    )


def _latent_attention(attention: LatentAttention.Config, layer: int, tp: int) -> LatentAttention.Config:
    """The cache holds the keys and values of heads, as training computes them, and no latents."""
    n_heads = _share("n_heads", attention.n_heads, tp)
    whole_queries = attention.q_lora_rank == 0
    return dataclasses.replace(
        attention,
        n_heads=n_heads,
        wq=_column_parallel(attention.wq, tp) if whole_queries else None,
        wq_b=None if whole_queries else _column_parallel(attention.wq_b, tp),
        wkv_b=_column_parallel(attention.wkv_b, tp),
        wo=_row_parallel(attention.wo, tp),
        inner_attention=PagedAttention.Config(
            layer=layer,
            n_heads=n_heads,
            n_kv_heads=n_heads,
            head_dim=attention.qk_nope_head_dim + attention.qk_rope_head_dim,
        ),
    )


def _gated_attention(attention: Qwen35Attention.Config, layer: int, tp: int) -> Qwen35Attention.Config:
    """A query head's rows are beside those of its gate, so a rank's share has both."""
    n_heads, n_kv_heads = _share("n_heads", attention.n_heads, tp), _share("n_kv_heads", attention.n_kv_heads, tp)
    return dataclasses.replace(
        attention,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        wq=_column_parallel(attention.wq, tp),
        wk=_column_parallel(attention.wk, tp),
        wv=_column_parallel(attention.wv, tp),
        wo=_row_parallel(attention.wo, tp),
        inner_attention=PagedAttention.Config(
            layer=layer, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=attention.head_dim
        ),
    )


def _delta_net(delta_net: DeltaNet.Config, layer: int, tp: int) -> DeltaNet.Config:
    """One rank's heads, over vLLM's cache of states."""
    keys, values = delta_net.in_proj_k.out_features, delta_net.in_proj_v.out_features
    n_key_heads = _share("n_key_heads", keys // delta_net.key_head_dim, tp)
    n_value_heads = _share("n_value_heads", values // delta_net.value_head_dim, tp)
    channels = {
        "conv_q": n_key_heads * delta_net.key_head_dim,
        "conv_k": n_key_heads * delta_net.key_head_dim,
        "conv_v": n_value_heads * delta_net.value_head_dim,
    }
    convolutions = {
        name: dataclasses.replace(getattr(delta_net, name), in_channels=size, out_channels=size, groups=size)
        for name, size in channels.items()
    }
    linears = ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z", "in_proj_a", "in_proj_b")
    return changed(
        delta_net,
        type(delta_net),
        **{name: _column_parallel(getattr(delta_net, name), tp) for name in linears},
        **convolutions,
        out_proj=_row_parallel(delta_net.out_proj, tp),
        states=StateCache.Config(
            layer=layer,
            sizes=(
                (delta_net.conv_kernel_size - 1, sum(channels.values())),
                (n_value_heads, delta_net.key_head_dim, delta_net.value_head_dim),
            ),
        ),
    )


def _feed_forward(feed_forward: FeedForward.Config, tp: int) -> FeedForward.Config:
    _share("hidden_dim", feed_forward.w1.out_features, tp)
    return dataclasses.replace(
        feed_forward,
        w1=_column_parallel(feed_forward.w1, tp),
        w3=_column_parallel(feed_forward.w3, tp),
        w2=_row_parallel(feed_forward.w2, tp),
    )


def _mixture(moe: MoE.Config, tp: int) -> MoE.Config:
    routed, shared = moe.routed_experts, moe.shared_experts
    hidden = _share("hidden_dim", routed.inner_experts.hidden_dim, tp)
    inner = dataclasses.replace(routed.inner_experts, hidden_dim=hidden)
    if isinstance(inner, BiasedExperts.Config):
        inner.num_parts = tp
    return dataclasses.replace(
        moe,
        routed_experts=SlicedExperts.Config(inner_experts=inner, token_dispatcher=routed.token_dispatcher),
        shared_experts=None if shared is None else _feed_forward(shared, tp),
    )


def _record_routing(layers: list, record: RoutingRecord) -> None:
    inner = [layer.attention.inner_attention for layer in layers if layer.attention is not None]
    record.attention_layer = next(attention.name for attention in inner if attention.window is None)
    for number, layer in enumerate(layer for layer in layers if layer.moe is not None):
        if not isinstance(layer.moe.router, ExpertRouter.Config):
            raise ValueError(
                f"generator.record_routing=True: a router of class {type(layer.moe.router).__qualname__} does not say "
                "which experts it has chosen; use algorithm.expert_routing='own'"
            )
        router = changed(layer.moe.router, RecordingRouter.Config, layer=number, record=record)
        layer.moe = dataclasses.replace(layer.moe, router=router)


def _column_parallel(config: Linear.Config, tp: int) -> Linear.Config:
    return dataclasses.replace(config, out_features=config.out_features // tp)


def _row_parallel(config: Linear.Config, tp: int) -> Linear.Config:
    # Training ranks may add a share of the bias each; here the bias is whole.
    return PackedLinear.Config(
        in_features=config.in_features // tp,
        out_features=config.out_features,
        bias=config.bias,
        param_init=config.param_init,
        sums_ranks=tp > 1,
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


def whole_adapters(spec: ModelSpec, adapters: LoRAConfig, dtype: str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of A and B of every layer with adapters, unsharded, by torchtitan's name (`...wo.lora_a.weight`).
    Raises ValueError for a target without a layer in the model."""
    parameters = whole_parameters(lora_spec(spec, adapters), dtype)
    return {name: entry for name, entry in parameters.items() if is_adapter(name)}


def adapted_layers(spec: ModelSpec, adapters: LoRAConfig) -> list[str]:
    """The layers that have adapters, by torchtitan's names."""
    end = ".lora_a.weight"
    names = whole_adapters(spec, adapters, "float32")
    return [name.removesuffix(end) for name in names if name.endswith(end)]

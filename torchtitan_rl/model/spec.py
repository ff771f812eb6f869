"""Model specs: torchtitan's own Qwen3 config classes, for any shape, for training.

A spec is never changed once built: `training_spec` and `generator_plan.generator_spec` each make a new
one with `dataclasses.replace`.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import spmd_types as spmd
import torch.nn as nn

from torchtitan_rl import adapters

adapters.adapt_torchtitan()

from torchtitan.components.optimizer import register_moe_load_balancing_hook  # noqa: E402
from torchtitan.models.common import CosSinRoPE, Embedding, Linear  # noqa: E402
from torchtitan.models.common.attention import VarlenAttention  # noqa: E402
from torchtitan.models.common.config_utils import (  # noqa: E402
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.decoder_sharding import dense_param_placement  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402
from torchtitan.models.qwen3 import Qwen3Model, model_registry, parallelize_qwen3, qwen3_configs  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3TransformerBlock  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402

from torchtitan_rl.config.model import ExpertsShape, ModelConfig, Qwen3Shape  # noqa: E402
from torchtitan_rl.model.attention import PackedSDPA  # noqa: E402
from torchtitan_rl.model.experts import ExpertLayer, Experts, Gate, Qwen3Adapter  # noqa: E402
from torchtitan_rl.model.files import read_shape  # noqa: E402
from torchtitan_rl.model.logprob_head import LogprobHead  # noqa: E402
from torchtitan_rl.model.value_head import ValueHead  # noqa: E402

__all__ = ["build_spec", "training_spec", "critic_spec", "flavor_shape", "shape_of"]

_NORMAL = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}


def _norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init={"weight": nn.init.ones_})


def _model_config(shape: Qwen3Shape) -> Qwen3Model.Config:
    """Qwen3 of any size, put together from the same config classes as torchtitan's standard flavours."""
    rope = CosSinRoPE.Config(dim=shape.head_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta)
    return Qwen3Model.Config(
        vocab_size=shape.vocab_size,
        dim=shape.dim,
        norm=_norm(shape.dim, shape.norm_eps),
        enable_weight_tying=shape.tie_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size,
            embedding_dim=shape.dim,
            param_init={"weight": skip_param_init if shape.tie_embeddings else _NORMAL["weight"]},
        ),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=_NORMAL),
        layers=[_block(shape, rope) for _ in range(shape.n_layers)],
    )


def _block(shape: Qwen3Shape, rope: CosSinRoPE.Config) -> Qwen3TransformerBlock.Config:
    attention = make_gqa_config(
        dim=shape.dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        head_dim=shape.head_dim,
        wqkv_param_init=_NORMAL,
        wo_param_init=_NORMAL,
        inner_attention=get_attention_config("varlen"),
        fuse_qkv=True,
        rope=rope,
        qk_norm=_norm(shape.head_dim, shape.norm_eps),
    )
    if shape.experts is None:
        feed_forward = {
            "feed_forward": make_ffn_config(
                dim=shape.dim, hidden_dim=shape.hidden_dim, w1_param_init=_NORMAL, w2w3_param_init=_NORMAL
            )
        }
    else:
        feed_forward = {"moe": _mixture(shape, shape.experts)}
    return Qwen3TransformerBlock.Config(
        attention_norm=_norm(shape.dim, shape.norm_eps),
        ffn_norm=_norm(shape.dim, shape.norm_eps),
        attention=attention,
        **feed_forward,
    )


def _mixture(shape: Qwen3Shape, experts: ExpertsShape):
    """A mixture of experts in place of the feed-forward layer."""
    return make_moe_config(
        num_experts=experts.num_experts,
        load_balance_coeff=experts.load_balance_coeff,
        router=make_router_config(
            dim=shape.dim,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            gate_param_init=_NORMAL,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=make_routed_experts_config(
            dim=shape.dim,
            hidden_dim=shape.hidden_dim,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            param_init=dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), _NORMAL["weight"]),
            comm_backend="standard",
        ),
    )


def build_spec(config: ModelConfig) -> ModelSpec:
    """torchtitan's spec of the configured model, with the canonical parallel plan and state-dict adapter."""
    if config.flavor is not None:
        spec = model_registry(config.flavor, attn_backend="varlen")
        spec = dataclasses.replace(spec, state_dict_adapter=Qwen3Adapter)
        for layer in spec.model.layers:
            if layer.moe is not None:  # Hugging Face's model of that name has no load-balancing bias
                layer.moe.load_balance_coeff = None
    else:
        spec = ModelSpec(
            name="qwen3",
            flavor="custom",
            model=_model_config(read_shape(config)),
            parallelize_fn=parallelize_qwen3,
            pipelining_fn=None,
            post_optimizer_build_fn=register_moe_load_balancing_hook,
            state_dict_adapter=Qwen3Adapter,
        )
    for layer in spec.model.layers:
        if layer.moe is not None:
            moe = layer.moe = _recast(layer.moe, ExpertLayer.Config)
            moe.router.gate = _recast(moe.router.gate, Gate.Config)
            moe.routed_experts.inner_experts = _recast(moe.routed_experts.inner_experts, Experts.Config)
    return spec


def training_spec(spec: ModelSpec, trainer_view, *, attention: str, chunk_bytes: int) -> ModelSpec:
    """A new spec to train from: sharding filled in, packed attention, and a head that returns log-probabilities.

    `trainer_view` is any object with a torchtitan `parallelism` config. `attention` is `"sdpa"` or `"varlen"`.
    """
    model = copy.deepcopy(spec.model)
    model.update_from_config(config=trainer_view)
    if attention == "sdpa":
        for layer in model.layers:
            layer.attention.inner_attention = _recast(layer.attention.inner_attention, PackedSDPA.Config)
    if isinstance(model.lm_head, ValueHead.Config):
        model.lm_head.sharding_config = ShardingConfig(
            state_shardings={"weight": dense_param_placement(tp=spmd.R)},
            in_src_shardings=model.lm_head.sharding_config.in_src_shardings,
            in_dst_shardings=model.lm_head.sharding_config.in_dst_shardings,
        )
        return dataclasses.replace(spec, model=model)
    head = _recast(model.lm_head, LogprobHead.Config, chunk_bytes=chunk_bytes)
    # The head's outputs are per-token numbers, equal on every TP rank, not vocabulary shards of logits.
    sharding = model.lm_head.sharding_config
    head.sharding_config = ShardingConfig(
        state_shardings=sharding.state_shardings,
        in_src_shardings=sharding.in_src_shardings,
        in_dst_shardings=sharding.in_dst_shardings,
    )
    model.lm_head = head
    return dataclasses.replace(spec, model=model)


def critic_spec(spec: ModelSpec) -> ModelSpec:
    """A new spec of the same model with one value per position instead of logits; values start at 0."""
    model = copy.deepcopy(spec.model)
    model.enable_weight_tying = False
    model.tok_embeddings.param_init = {"weight": _NORMAL["weight"]}
    model.lm_head = ValueHead.Config(in_features=model.dim, out_features=1, param_init={"weight": nn.init.zeros_})
    return dataclasses.replace(spec, model=model)


def _recast(config, config_class, **changes):
    """A config of another class with the fields that both classes have. Fields that only the old class has, such as a
    float8 converter's, are left behind."""
    known = {f.name for f in dataclasses.fields(config_class)}
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name in known}
    return config_class(**fields, **changes)


def shape_of(model: Qwen3Model.Config) -> Qwen3Shape:
    """The sizes of a torchtitan Qwen3 config."""
    attention, moe = model.layers[0].attention, model.layers[0].moe
    if moe is None:
        hidden_dim, experts = model.layers[0].feed_forward.w1.out_features, None
    else:
        hidden_dim = moe.routed_experts.inner_experts.hidden_dim
        experts = ExpertsShape(
            num_experts=moe.num_experts, top_k=moe.router.top_k, load_balance_coeff=moe.load_balance_coeff
        )
    return Qwen3Shape(
        vocab_size=model.vocab_size,
        dim=model.dim,
        n_layers=len(model.layers),
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads,
        head_dim=attention.head_dim,
        hidden_dim=hidden_dim,
        experts=experts,
        rope_theta=attention.rope.theta,
        max_seq_len=attention.rope.max_seq_len,
        tie_embeddings=model.enable_weight_tying,
        norm_eps=model.norm.eps,
    )


def flavor_shape(flavor: str) -> Qwen3Shape:
    """The sizes of a standard flavour. Raises ValueError for an unknown one."""
    if flavor not in qwen3_configs:
        raise ValueError(f"model.flavor={flavor!r}: is not a Qwen3 flavour; use one of {', '.join(qwen3_configs)}")
    return shape_of(build_spec(ModelConfig(flavor=flavor)).model)


assert issubclass(PackedSDPA.Config, VarlenAttention.Config)

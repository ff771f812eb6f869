"""Model specs: torchtitan's own Qwen3 config classes, for any shape, for training.

A spec is never changed once built: `training_spec` and `generator_plan.generator_spec` each make a new
one with `dataclasses.replace`.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial

import torch.nn as nn

from torchtitan_rl import platform

platform.adapt_torchtitan()

from torchtitan.models.common import CosSinRoPE, Embedding, Linear  # noqa: E402
from torchtitan.models.common.attention import VarlenAttention  # noqa: E402
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.common.param_init import skip_param_init  # noqa: E402
from torchtitan.models.qwen3 import Qwen3Model, model_registry, parallelize_qwen3, qwen3_configs  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3TransformerBlock  # noqa: E402
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402

from torchtitan_rl.model.attention import PackedSDPA  # noqa: E402
from torchtitan_rl.model.config import ModelConfig, Qwen3Shape, resolve_shape  # noqa: E402
from torchtitan_rl.model.logprobs import LogprobHead  # noqa: E402

__all__ = ["build_spec", "training_spec", "flavor_shape", "shape_of"]

_NORMAL = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}


def _norm(size: int, eps: float) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=size, eps=eps, param_init={"weight": nn.init.ones_})


def _model_config(shape: Qwen3Shape) -> Qwen3Model.Config:
    """Qwen3 of any size, put together from the same config classes as torchtitan's standard flavours."""
    rope = CosSinRoPE.Config(dim=shape.head_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta)

    def block() -> Qwen3TransformerBlock.Config:
        return Qwen3TransformerBlock.Config(
            attention_norm=_norm(shape.dim, shape.norm_eps),
            ffn_norm=_norm(shape.dim, shape.norm_eps),
            attention=make_gqa_config(
                dim=shape.dim, n_heads=shape.n_heads, n_kv_heads=shape.n_kv_heads, head_dim=shape.head_dim,
                wqkv_param_init=_NORMAL, wo_param_init=_NORMAL, inner_attention=get_attention_config("varlen"),
                fuse_qkv=True, rope=rope, qk_norm=_norm(shape.head_dim, shape.norm_eps),
            ),
            feed_forward=make_ffn_config(
                dim=shape.dim, hidden_dim=shape.hidden_dim, w1_param_init=_NORMAL, w2w3_param_init=_NORMAL,
            ),
        )

    return Qwen3Model.Config(
        vocab_size=shape.vocab_size, dim=shape.dim, norm=_norm(shape.dim, shape.norm_eps),
        enable_weight_tying=shape.tie_embeddings,
        tok_embeddings=Embedding.Config(
            num_embeddings=shape.vocab_size, embedding_dim=shape.dim,
            param_init={"weight": skip_param_init if shape.tie_embeddings else _NORMAL["weight"]},
        ),
        lm_head=Linear.Config(in_features=shape.dim, out_features=shape.vocab_size, param_init=_NORMAL),
        layers=[block() for _ in range(shape.n_layers)],
    )


def build_spec(config: ModelConfig) -> ModelSpec:
    """torchtitan's spec of the configured model, with its canonical parallel plan and state-dict adapter."""
    if config.flavor is not None:
        return model_registry(config.flavor, attn_backend="varlen")
    return ModelSpec(
        name="qwen3", flavor="custom", model=_model_config(resolve_shape(config)), parallelize_fn=parallelize_qwen3,
        pipelining_fn=None, post_optimizer_build_fn=None, state_dict_adapter=Qwen3StateDictAdapter,
    )


def training_spec(spec: ModelSpec, trainer_view, *, attention: str, chunk_bytes: int) -> ModelSpec:
    """A new spec to train from: sharding filled in, packed attention, and a head that returns log-probabilities.

    `trainer_view` is any object with a torchtitan `parallelism` config. `attention` is `"sdpa"` or `"varlen"`.
    """
    model = copy.deepcopy(spec.model)
    model.update_from_config(config=trainer_view)
    if attention == "sdpa":
        for layer in model.layers:
            layer.attention.inner_attention = _recast(layer.attention.inner_attention, PackedSDPA.Config)
    head = _recast(model.lm_head, LogprobHead.Config, chunk_bytes=chunk_bytes)
    # The head's outputs are per-token numbers, equal on every TP rank, not vocabulary shards of logits.
    sharding = model.lm_head.sharding_config
    head.sharding_config = ShardingConfig(
        state_shardings=sharding.state_shardings, in_src_shardings=sharding.in_src_shardings,
        in_dst_shardings=sharding.in_dst_shardings,
    )
    model.lm_head = head
    return dataclasses.replace(spec, model=model)


def _recast(config, config_class, **changes):
    """The fields of one config in a subclass of it."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    return config_class(**fields, **changes)


def shape_of(model: Qwen3Model.Config) -> Qwen3Shape:
    """The sizes of a dense torchtitan Qwen3 config."""
    attention = model.layers[0].attention
    return Qwen3Shape(
        vocab_size=model.vocab_size, dim=model.dim, n_layers=len(model.layers), n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads, head_dim=attention.head_dim,
        hidden_dim=model.layers[0].feed_forward.w1.out_features, rope_theta=attention.rope.theta,
        max_seq_len=attention.rope.max_seq_len, tie_embeddings=model.enable_weight_tying, norm_eps=model.norm.eps,
    )


def flavor_shape(flavor: str) -> Qwen3Shape:
    """The sizes of a standard flavour. Raises ValueError for an unknown or mixture-of-experts one."""
    dense = [name for name in qwen3_configs if "moe" not in name and "-A" not in name]
    if flavor not in dense:
        raise ValueError(f"model.flavor={flavor!r}: is not a dense Qwen3 flavour; use one of {', '.join(dense)}")
    return shape_of(qwen3_configs[flavor]("varlen"))


assert issubclass(PackedSDPA.Config, VarlenAttention.Config)

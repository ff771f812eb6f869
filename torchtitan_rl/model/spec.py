"""Model specs: a family's spec of torchtitan, made ready for training.

A spec is never changed once built: `training_spec` and `engine.plan.generator_spec` each make a new one with
`dataclasses.replace`.
"""

from __future__ import annotations

import copy
import dataclasses

import spmd_types as spmd
import torch.nn as nn

from torchtitan_rl import adapters

adapters.adapt_torchtitan()

from torchtitan.models.common.attention import VarlenAttention  # noqa: E402
from torchtitan.models.common.decoder_sharding import dense_param_placement  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.moe import TokenChoiceTopKRouter  # noqa: E402
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.protocols.sharding import ShardingConfig  # noqa: E402

from torchtitan_rl.config.model import ModelConfig  # noqa: E402
from torchtitan_rl.families.blocks import NORMAL  # noqa: E402
from torchtitan_rl.families.qwen3 import flavor_spec  # noqa: E402
from torchtitan_rl.model.attention import PackedSDPA  # noqa: E402
from torchtitan_rl.model.experts import BiasedExperts, ExpertLayer, ExpertRouter, Experts, Gate  # noqa: E402
from torchtitan_rl.model.files import read_shape  # noqa: E402
from torchtitan_rl.model.linear import TrainedLinear  # noqa: E402
from torchtitan_rl.model.logprob_head import LogprobHead  # noqa: E402
from torchtitan_rl.model.value_head import ValueHead  # noqa: E402

__all__ = ["build_spec", "training_spec", "with_positions", "critic_spec"]


def build_spec(config: ModelConfig) -> ModelSpec:
    """torchtitan's spec of the configured model, with the canonical parallel plan and state-dict adapter. A mixture's
    experts compute alike in trainer and generator (`model.experts`)."""
    spec = read_shape(config).model_spec() if config.flavor is None else flavor_spec(config.flavor)
    for layer in spec.model.layers:
        if layer.moe is not None:
            moe = layer.moe = _recast(layer.moe, ExpertLayer.Config)
            if type(moe.router) is TokenChoiceTopKRouter.Config:  # a family's own router stays
                moe.router = _recast(moe.router, ExpertRouter.Config)
            moe.router.gate = _recast(moe.router.gate, Gate.Config)
            experts = moe.routed_experts.inner_experts
            biased = isinstance(experts, GptOssGroupedExperts.Config)
            moe.routed_experts.inner_experts = _recast(experts, BiasedExperts.Config if biased else Experts.Config)
    return spec


def training_spec(
    spec: ModelSpec,
    trainer_view,
    *,
    attention: str,
    chunk_bytes: int,
    kernels: bool = True,
    float32_head: bool = False,
    chosen_products: bool = True,
) -> ModelSpec:
    """A new spec to train from: sharding filled in, packed attention, and a head that returns log-probabilities.

    `trainer_view` is any object with a torchtitan `parallelism` config. `attention` is `"sdpa"` or `"varlen"`.
    `chunk_bytes`, `kernels` and `float32_head` are the head's (`LogprobHead.Config`). `chosen_products`: linear layers
    are `TrainedLinear`; for selective checkpointing they must not be, which knows torch's own products alone and would
    compute all others again.
    """
    model = copy.deepcopy(spec.model)
    model.update_from_config(config=trainer_view)
    for _, linear, parent, field in list(model.traverse(Linear.Config)):
        if chosen_products and type(linear) is Linear.Config:  # a converter's layer, or a family's own, stays
            setattr(parent, field, _recast(linear, TrainedLinear.Config))
    if attention == "sdpa":
        for layer in model.layers:
            if layer.attention is None:
                continue
            layer.attention.inner_attention = _recast(layer.attention.inner_attention, PackedSDPA.Config)
    if isinstance(model.lm_head, ValueHead.Config):
        model.lm_head.sharding_config = ShardingConfig(
            state_shardings={"weight": dense_param_placement(tp=spmd.R)},
            in_src_shardings=model.lm_head.sharding_config.in_src_shardings,
            in_dst_shardings=model.lm_head.sharding_config.in_dst_shardings,
        )
        return dataclasses.replace(spec, model=model)
    head = _recast(model.lm_head, LogprobHead.Config, chunk_bytes=chunk_bytes, kernels=kernels, float32=float32_head)
    # The head's outputs are per-token numbers, equal on every TP rank, not vocabulary shards of logits.
    sharding = model.lm_head.sharding_config
    head.sharding_config = ShardingConfig(
        state_shardings=sharding.state_shardings,
        in_src_shardings=sharding.in_src_shardings,
        in_dst_shardings=sharding.in_dst_shardings,
    )
    model.lm_head = head
    return dataclasses.replace(spec, model=model)


def with_positions(spec: ModelSpec, num_positions: int) -> ModelSpec:
    """A new spec whose rotary tables cover the first `num_positions` positions, or all of the model's where there are
    fewer. torchtitan keeps a table in each layer: for 131,072 positions that is 32 MiB or more a layer."""
    model = copy.deepcopy(spec.model)
    for layer in model.layers:
        rope = getattr(layer.attention, "rope", None)  # a recurrent layer has none
        if rope is not None:
            rope.max_seq_len = min(rope.max_seq_len, num_positions)
    return dataclasses.replace(spec, model=model)


def critic_spec(spec: ModelSpec) -> ModelSpec:
    """A new spec of the same model with one value per position instead of logits; values start at 0."""
    model = copy.deepcopy(spec.model)
    model.enable_weight_tying = False
    model.tok_embeddings.param_init = {"weight": NORMAL["weight"]}
    model.lm_head = ValueHead.Config(in_features=model.dim, out_features=1, param_init={"weight": nn.init.zeros_})
    return dataclasses.replace(spec, model=model)


def _recast(config, config_class, **changes):
    """A config of another class with the fields that both classes have. Fields that only the old class has, such as a
    float8 converter's, are left behind."""
    known = {f.name for f in dataclasses.fields(config_class)}
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name in known}
    return config_class(**fields, **changes)


assert issubclass(PackedSDPA.Config, VarlenAttention.Config)

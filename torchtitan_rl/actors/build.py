"""Builds a sharded, initialised model and an optimizer from a trainer's config."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.utils import set_default_dtype

from torchtitan_rl import platform
from torchtitan_rl.actors.operations import VALUE_ROLES
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model import lora
from torchtitan_rl.model.files import assets_dir, has_weights
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.model.sharding import load_whole
from torchtitan_rl.model.spec import build_spec, critic_spec, training_spec, with_positions
from torchtitan_rl.weights import hf

__all__ = ["BuiltModel", "CutModel", "cut_model", "build_model", "build_optimizers"]

_ACTIVATION_CHECKPOINT = {"none": None, "selective": SelectiveAC.Config, "full": FullAC.Config}


@dataclass(kw_only=True, slots=True)
class BuiltModel:
    """A sharded model, and the spec and shape that publications and exports need."""

    model: torch.nn.Module
    spec: ModelSpec
    shape: DecoderShape


@dataclass(kw_only=True, slots=True)
class CutModel:
    """A model on the meta device, cut into one rank's shards, before it has memory or weights."""

    model: Any
    spec: ModelSpec
    base: Any
    """The model's config without adapters."""
    shape: DecoderShape


def cut_model(
    config: TrainerConfig,
    model_config: ModelConfig,
    *,
    role: str,
    parallel_dims,
    dump_dir: str,
    attention: str = "",
    chunk_bytes: int = 0,
) -> CutModel:
    """Builds spec and converters, and shards the model by torchtitan's canonical plan, on the meta device. The process
    group may be a fake one. `attention`, `chunk_bytes`: those of another device than this machine's."""
    spec = build_spec(model_config)
    shape = resolve_shape(model_config)
    for converter in config.converters:
        spec.model = converter.build().convert(spec.model)
    if role in VALUE_ROLES:
        spec = critic_spec(spec)
    if config.attention != "auto":
        attention = config.attention
    elif shape.has_sinks:
        attention = "sdpa"
    spec = training_spec(
        spec,
        SimpleNamespace(parallelism=config.parallelism),
        attention=attention or platform.attention_backend(config.training.mixed_precision_param),
        chunk_bytes=chunk_bytes or platform.logprob_chunk_bytes(config.logprob_chunk_mib),
        kernels=config.logprob_kernels == "auto",
        float32_head=model_config.float32_head,
        chosen_products=config.activation_checkpoint != "selective",
    )
    if config.training.seq_len:  # no datum is longer
        spec = with_positions(spec, config.training.seq_len)
    base = spec.model
    if config.lora is not None:
        spec = lora.lora_spec(spec, config.lora)
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model.build()
    _stay_tied(model)
    ac_class = _ACTIVATION_CHECKPOINT[config.activation_checkpoint]
    model = spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=ac_class() if ac_class else None,
        dump_folder=dump_dir,
    )
    platform.adapt_parallel_model(model)
    return CutModel(model=model, spec=spec, base=base, shape=shape)


def build_model(
    config: TrainerConfig,
    model_config: ModelConfig,
    *,
    role: str,
    seed: int,
    parallel_dims,
    device: torch.device,
    dump_dir: str,
) -> BuiltModel:
    """Builds and shards the model, and takes weights from files or the seed."""
    cut = cut_model(config, model_config, role=role, parallel_dims=parallel_dims, dump_dir=dump_dir)
    model, spec = cut.model, cut.spec
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    model.train()
    if has_weights(model_config):
        directory = assets_dir(model_config)
        adapter = spec.state_dict_adapter(spec.model, str(directory))
        hf.load_hf_weights(model, adapter, directory, cut.shape, head=role not in VALUE_ROLES)
    else:
        load_whole(model, _draw(cut.base, seed, TORCH_DTYPE_MAP[config.training.dtype]), device)
    if config.lora is not None:
        lora.require_frozen_base(model)
        lora.draw_adapters(model, seed)
    return BuiltModel(model=model, spec=spec, shape=cut.shape)


def build_optimizers(config: TrainerConfig, spec: ModelSpec, model: torch.nn.Module, parallel_dims):
    """torchtitan's AdamW container, with the hooks that the spec and the config register."""
    optimizer = config.optimizer
    container = default_adamw(
        lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    container.implementation = optimizer.implementation
    optimizers = container.build(model_parts=[model])
    for register in (spec.post_optimizer_build_fn, config.post_optimizer_build_fn):
        if register is not None:
            register(optimizers, [model], parallel_dims)
    return optimizers


def _draw(base, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights that do not depend on the layout: each rank draws the whole model.

    `base` is the model's config without adapters, so a seed draws the same base weights with and without LoRA.
    """
    torch.manual_seed(seed)
    with set_default_dtype(dtype):
        whole = base.build()
    whole.init_weights()
    return whole.state_dict()


def _stay_tied(model) -> None:
    """Ties head and embedding again between tensor parallelism and FSDP.

    Tensor parallelism replaces parameters module by module, which unties the head from the embedding. torchtitan ties
    both again only at initialisation. By then FSDP would hold two buffers for one parameter and, with a padded shard,
    go on reading the buffer that the optimizer does not write."""
    cut = model.parallelize

    def parallelize(parallel_dims) -> None:
        cut(parallel_dims)
        if model.enable_weight_tying:
            model.tok_embeddings.weight = model.lm_head.weight

    model.parallelize = parallelize

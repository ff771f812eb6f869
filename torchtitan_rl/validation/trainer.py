"""Checks of a trainer mesh's layout against its model: degrees, sequence lengths, experts."""

from __future__ import annotations

import difflib

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import LORA_TARGETS, LoRAConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.converters import check_converters
from torchtitan_rl.model.files import has_weights
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.validation.algorithm import check_function

__all__ = ["check_trainer", "check_degree", "check_context", "check_experts_kernel"]


def check_trainer(where: str, trainer: TrainerConfig, model: ModelConfig, longest: int) -> None:
    """Raises ValueError for a layout that does not fit the model or `longest`, the run's longest sequence in tokens."""
    check_converters(trainer.converters, f"{where}.converters")
    if trainer.post_optimizer_build_fn is not None:
        check_function(f"{where}.post_optimizer_build_fn", trainer.post_optimizer_build_fn)
    if trainer.lora is not None:
        _check_adapters(where, trainer.lora)
    parallel, shape = trainer.parallelism, resolve_shape(model)
    check_degree(f"{where}.parallelism.tensor_parallel_degree", parallel.tensor_parallel_degree, shape)
    tp = parallel.tensor_parallel_degree
    rows = -(-shape.vocab_size // tp)  # rows of the head per rank; the last rank has the rest
    if rows * (tp - 1) >= shape.vocab_size:
        raise ValueError(
            f"{where}.parallelism.tensor_parallel_degree={tp}: vocab_size={shape.vocab_size} in parts of {rows} "
            "leaves a rank without vocabulary; lower it"
        )
    _check_experts(where, trainer, model, shape)
    if trainer.lora is not None and shape.experts is not None and shape.experts.load_balance_coeff:
        raise ValueError(
            f"{where}.lora: leaves the base as it is, and model.shape.experts.load_balance_coeff="
            f"{shape.experts.load_balance_coeff} moves a bias of its routers, which no checkpoint of adapters has; use "
            "load_balance_coeff=None"
        )
    for target in trainer.lora.target_modules if trainer.lora is not None else ():
        if target not in shape.lora_targets:
            raise ValueError(
                f"{where}.lora.target_modules={target!r}: is no layer of a {shape.name} that can have adapters here; "
                + (f"use some of {', '.join(shape.lora_targets)}" if shape.lora_targets else "train the whole model")
            )
    if shape.has_sinks:
        _check_sinks(where, trainer, shape)
    if trainer.shared_prefix != "off":
        _check_shared_prefix(where, trainer, shape)
    _check_attention(where, trainer)
    check_context(f"{where}.training.seq_len", trainer.training.seq_len, shape, longest)


def _check_adapters(where: str, lora: LoRAConfig) -> None:
    for target in lora.target_modules:
        if target in ("q_proj", "k_proj", "v_proj"):
            raise ValueError(
                f"{where}.lora.target_modules={target!r}: query, key and value are one layer; use 'qkv_proj'"
            )
        if target not in LORA_TARGETS:
            near = difflib.get_close_matches(target, LORA_TARGETS, 1)
            raise ValueError(
                f"{where}.lora.target_modules={target!r}: is not a layer that can have an adapter; "
                + (f"did you mean {near[0]!r}?" if near else f"use some of {', '.join(LORA_TARGETS)}")
            )


def _check_sinks(where: str, trainer: TrainerConfig, shape: DecoderShape) -> None:
    if trainer.attention == "varlen":
        raise ValueError(
            f"{where}.attention='varlen': torch's kernel leaves out the log-sum-exp's gradient, by which the sinks of "
            f"a {shape.name} act on queries and keys; use 'auto' or 'sdpa'"
        )
    tp = trainer.parallelism.tensor_parallel_degree
    if tp > 1 and trainer.lora is not None and "o_proj" in trainer.lora.target_modules:
        raise ValueError(
            f"{where}.lora.target_modules='o_proj': torchtitan's layer of that name in a {shape.name} takes no adapter "
            f"over {tp} tensor-parallel ranks; use qkv_proj alone, or {where}.parallelism.tensor_parallel_degree=1"
        )


def _check_attention(where: str, trainer: TrainerConfig) -> None:
    """Raises ValueError for variable-length attention where there is none, or where it would compute in bfloat16 what
    the model computes in float32."""
    dtype = trainer.training.mixed_precision_param
    if trainer.attention == "varlen" and platform.attention_backend(dtype) != "varlen":
        raise ValueError(
            f"{where}.attention='varlen': is a kernel for bfloat16 on a GPU, and the trainer computes in {dtype} on "
            f"{platform.device_type()}; use 'auto' or 'sdpa'"
        )


def _check_shared_prefix(where: str, trainer: TrainerConfig, shape: DecoderShape) -> None:
    """Raises ValueError for a model or a setting with which siblings cannot compute their prompt together."""
    reason, experts, tp = "", shape.experts, trainer.parallelism.tensor_parallel_degree
    if shape.state_sizes:
        reason = f"the states of a {shape.name}'s recurrent layers begin anew in every datum"
    elif experts is not None and experts.load_balance_coeff is not None:
        reason = (
            f"the load-balancing bias counts tokens (experts.load_balance_coeff={experts.load_balance_coeff:g}), and "
            "a prompt's would count once"
        )
    elif trainer.attention == "varlen":
        reason = f"with {where}.attention='varlen' attention computes each datum by itself"
    elif trainer.compile.enable:
        reason = f"with {where}.compile.enable=True the layers would be compiled anew for every batch's prompts"
    elif trainer.converters or tp > 1:
        setting = "converters" if trainer.converters else f"parallelism.tensor_parallel_degree={tp}"
        reason = f"with {where}.{setting} it has not been compared with datums that are computed whole"
    if reason:
        raise ValueError(f"{where}.shared_prefix={trainer.shared_prefix!r}: {reason}; use 'off'")


def check_degree(where: str, degree: int, shape) -> None:
    for name, size in shape.cut_sizes.items():
        if size % degree:
            sizes = shape.cut_sizes.values()
            divisors = [d for d in range(1, shape.n_kv_heads + 1) if all(size % d == 0 for size in sizes)]
            raise ValueError(f"{where}={degree}: must divide the model's {name}={size}; use one of {divisors}")


def check_context(where: str, limit: int, shape, longest: int) -> None:
    if longest > shape.max_seq_len:
        role = f"roles.{where.split('.')[1]}: " if where.startswith("roles.") else ""
        raise ValueError(
            f"{role}sampling.max_prompt_tokens + max_tokens = {longest}: exceed the model's "
            f"max_seq_len={shape.max_seq_len}; lower one of them"
        )
    if limit > shape.max_seq_len:
        raise ValueError(f"{where}={limit}: exceeds the model's max_seq_len={shape.max_seq_len}; lower it")
    if longest > limit:
        raise ValueError(
            f"{where}={limit}: is shorter than sampling.max_prompt_tokens + max_tokens = {longest}; "
            "raise it or lower one of them"
        )


def _check_experts(where: str, trainer: TrainerConfig, model: ModelConfig, shape: DecoderShape) -> None:
    """Raises ValueError for a mixture of experts that does not fit the layout, its own sizes or this machine's
    kernels."""
    parallel, experts = trainer.parallelism, shape.experts
    degree, field = parallel.expert_parallel_degree, f"{where}.parallelism.expert_parallel_degree"
    if experts is None:
        if degree != 1:
            raise ValueError(f"{field}={degree}: the model has no experts; use 1")
        return
    if experts.top_k > experts.num_experts:
        raise ValueError(
            f"model.shape.experts.top_k={experts.top_k}: must be at most num_experts={experts.num_experts}"
        )
    ranks = parallel.data_parallel_shard_degree * parallel.tensor_parallel_degree
    fits = [d for d in range(1, ranks + 1) if ranks % d == experts.num_experts % d == 0]
    if degree not in fits:
        raise ValueError(
            f"{field}={degree}: must divide the model's num_experts={experts.num_experts} and "
            f"data_parallel_shard_degree x tensor_parallel_degree = {ranks}, whose ranks it uses; use one of {fits}"
        )
    if has_weights(model):  # torchtitan's adapter gives each rank an equal part of the checkpoint's experts
        replicas, dp = parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree
        shards = ranks if degree > 1 else dp
        if replicas > 1:
            raise ValueError(
                f"{where}.parallelism.data_parallel_replicate_degree={replicas}: a checkpoint's experts cannot be read "
                "into replicas; use 1, and a larger data_parallel_shard_degree"
            )
        if shards < experts.num_experts and experts.num_experts % shards:
            raise ValueError(
                f"{where}.parallelism.data_parallel_shard_degree={dp}: a checkpoint's "
                f"num_experts={experts.num_experts} cannot be read into {shards} equal parts; use a degree that "
                "divides them"
            )
    cuts = parallel.tensor_parallel_degree if degree == 1 else 1  # with expert parallelism TP ranks hold whole experts
    check_experts_kernel(f"{where}.training.mixed_precision_param", trainer.training.mixed_precision_param, cuts, shape)


def check_experts_kernel(field: str, dtype: str, cuts: int, shape: DecoderShape) -> None:
    multiple = platform.grouped_mm_multiple(dtype)
    for name, size in (("dim", shape.dim), ("hidden_dim", shape.hidden_dim // cuts)):
        if size % multiple:
            cut = f" on each of {cuts} tensor-parallel ranks" if name == "hidden_dim" and cuts > 1 else ""
            raise ValueError(
                f"model.shape.{name}: {size}{cut} is not a multiple of {multiple}, which the experts' "
                f"kernel needs with {field}={dtype!r}; use a multiple"
            )
    if missing := platform.missing_grouped_mm(dtype):
        raise ValueError(f"{field}={dtype!r}: {missing}; use a dense model or another device")

"""Checks of a trainer mesh's layout against its model: degrees, sequence lengths, experts."""

from __future__ import annotations

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.converters import check_converters
from torchtitan_rl.model.files import has_weights
from torchtitan_rl.model.shape import resolve_shape

__all__ = ["check_trainer", "check_degree", "check_context", "check_experts_kernel", "check_positive"]


def check_trainer(where: str, trainer: TrainerConfig, model: ModelConfig, longest: int) -> None:
    """Raises ValueError for a layout that does not fit the model or `longest`, the run's longest sequence in tokens."""
    check_converters(trainer.converters, f"{where}.converters")
    if not 0 <= trainer.optimizer.lr < float("inf"):
        raise ValueError(f"{where}.optimizer.lr={trainer.optimizer.lr}: must not be negative; use 0 or more")
    if (norm := trainer.training.max_norm) is not None and not norm > 0:
        raise ValueError(f"{where}.training.max_norm={norm}: would scale every gradient to 0; use None for no clip")
    parallel, shape = trainer.parallelism, resolve_shape(model)
    check_degree(f"{where}.parallelism.tensor_parallel_degree", parallel.tensor_parallel_degree, shape)
    tp = parallel.tensor_parallel_degree
    rows = -(-shape.vocab_size // tp)  # rows of the head per rank; the last rank has the rest
    if rows * (tp - 1) >= shape.vocab_size:
        raise ValueError(
            f"{where}.parallelism.tensor_parallel_degree={tp}: vocab_size={shape.vocab_size} in parts of {rows} "
            "leaves a rank without vocabulary; lower it"
        )
    for name in ("data_parallel_shard_degree", "data_parallel_replicate_degree"):
        check_positive(f"{where}.parallelism.{name}", getattr(parallel, name))
    for name in ("pipeline_parallel_degree", "context_parallel_degree"):
        if getattr(parallel, name) != 1:
            raise ValueError(f"{where}.parallelism.{name}={getattr(parallel, name)}: is not supported; use 1")
    if parallel.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"{where}.parallelism.spmd_backend={parallel.spmd_backend!r}: use 'partial_dtensor', "
            "the backend that runs on gloo as well as on NCCL"
        )
    for target in trainer.lora.target_modules if trainer.lora is not None else ():
        if target not in shape.lora_targets:
            raise ValueError(
                f"{where}.lora.target_modules={target!r}: a {shape.name} has adapters of other layers alone; use "
                f"{', '.join(shape.lora_targets)}"
            )
    _check_experts(where, trainer, model, shape)
    check_context(f"{where}.training.seq_len", trainer.training.seq_len, shape, longest)
    check_positive(f"{where}.max_tokens_per_microbatch", trainer.max_tokens_per_microbatch)
    if trainer.logprob_chunk_mib < 0:
        raise ValueError(
            f"{where}.logprob_chunk_mib={trainer.logprob_chunk_mib}: must not be negative; 0 is the device's own"
        )


def check_degree(where: str, degree: int, shape) -> None:
    check_positive(where, degree)
    for name, size in shape.cut_sizes.items():
        if size % degree:
            sizes = shape.cut_sizes.values()
            divisors = [d for d in range(1, shape.n_kv_heads + 1) if all(size % d == 0 for size in sizes)]
            raise ValueError(f"{where}={degree}: must divide the model's {name}={size}; use one of {divisors}")


def check_context(where: str, limit: int, shape, longest: int) -> None:
    if longest > shape.max_seq_len:
        raise ValueError(
            f"sampling.max_prompt_tokens + max_tokens = {longest}: exceed the model's max_seq_len={shape.max_seq_len}; "
            "lower one of them"
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
    check_positive(field, degree)
    if experts is None:
        if degree != 1:
            raise ValueError(f"{field}={degree}: the model has no experts; use 1")
        return
    if not 1 <= experts.top_k <= experts.num_experts:
        raise ValueError(
            f"model.shape.experts.top_k={experts.top_k}: must be from 1 to num_experts={experts.num_experts}"
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


def check_positive(where: str, value: float) -> None:
    if value < 1:
        raise ValueError(f"{where}={value}: must be at least 1")

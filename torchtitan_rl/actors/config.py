"""What a trainer and a generator are configured by, without importing either (`PolicyTrainer.Config`, `Generator.Config`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig

__all__ = ["AdamWConfig", "TrainerConfig", "GeneratorConfig", "WeightSyncConfig"]


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """AdamW over all trainable parameters, through torchtitan's optimizer container."""

    lr: float = 1e-5
    """Peak learning rate; the controller's schedule scales it."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"


def _training() -> TrainingConfig:
    return TrainingConfig(mixed_precision_param="float32", seq_len=2048)


def _parallelism() -> ParallelismConfig:
    return ParallelismConfig(spmd_backend="partial_dtensor", data_parallel_shard_degree=1)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """A mesh of `parallelism` ranks that holds one model and trains it. The nested classes are torchtitan's own."""

    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    max_tokens_per_microbatch: int = 8192
    """Soft cap on packed tokens per forward; a longer datum gets a microbatch of its own."""
    training: TrainingConfig = field(default_factory=_training)
    """`seq_len` is the longest datum, `max_norm` the gradient clip, `mixed_precision_param` the compute dtype."""
    parallelism: ParallelismConfig = field(default_factory=_parallelism)
    """Degrees multiply to the number of ranks; data_parallel_shard_degree must be given."""
    num_hosts: int = 1
    """Hosts the mesh spans; its ranks are divided evenly."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    compile: CompileConfig = field(default_factory=CompileConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """auto: variable-length FlashAttention on CUDA, per-document scaled-dot-product elsewhere."""
    logprob_chunk_tokens: int = 2048
    """Tokens whose full-vocabulary logits exist at once."""
    num_threads: int = 0
    """CPU threads per rank; 0 shares a host's cores among the trainer's ranks there."""
    converters: list = field(default_factory=list)
    """torchtitan model-config converters, applied in order before the model is built."""
    post_optimizer_build_fn: Callable | None = None
    """Called with (optimizers, model parts, parallel dims) after the model spec's own."""

    @property
    def num_ranks(self) -> int:
        p = self.parallelism
        return p.data_parallel_replicate_degree * p.data_parallel_shard_degree * p.tensor_parallel_degree


@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    """vLLM engines that sample from the policy."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the generator's parameters, and therefore of the weights sent to it; there is no other setting."""
    tensor_parallel_degree: int = 1
    num_replicas: int = 1
    max_model_len: int = 2048
    """Prompt and completion together."""
    max_num_seqs: int = 256
    """Sequences decoded at once."""
    max_num_batched_tokens: int = 16384
    """Tokens of one engine iteration."""
    kv_cache_gib: float = 1.0
    """Memory of the KV cache, per rank."""
    model_impl: Literal["torchtitan", "vllm"] = "torchtitan"
    """"vllm" runs vLLM's own Qwen3 instead, for comparison."""
    enforce_eager: bool = True
    """False lets vLLM capture CUDA graphs."""
    num_threads: int = 0
    """CPU threads per rank; 0 shares the cores among a replica's ranks."""


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights travel. Their dtype is the generator's; quantised transfer is a non-goal for now."""

    transport: Literal["auto", "shared_memory", "store"] = "auto"
    """Of the payload; TorchStore always owns version, manifest and handle. auto: shared memory if one host has both ends."""
    verify: bool = True
    """Generators check the payload's checksum before they load it."""

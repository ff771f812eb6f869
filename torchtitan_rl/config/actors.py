"""What a trainer and a generator are configured by, without importing either (`PolicyTrainer.Config`,
`Generator.Config`)."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig

__all__ = ["AdamWConfig", "LoRAConfig", "TrainerConfig", "GeneratorConfig", "WeightSyncConfig"]


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """AdamW over all trainable parameters, through torchtitan's optimizer container."""

    lr: float = 1e-5
    """Peak learning rate; the controller's schedule scales it."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"


_LORA_TARGETS = ("qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(kw_only=True, slots=True)
class LoRAConfig:
    """Low-rank adapters: they alone train and are checkpointed. Example: `LoRAConfig(rank=16, alpha=32.0)`."""

    rank: int = 8
    """Inner size of an adapter."""
    alpha: float = 16.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: list[str] = field(default_factory=lambda: list(_LORA_TARGETS))
    """Layers that get one: qkv_proj (query, key and value, one layer here), o_proj, gate_proj, up_proj, down_proj."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"trainer.lora.rank={self.rank}: must be at least 1")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"trainer.lora.alpha={self.alpha}: must be positive; use the rank, or twice the rank")
        if not self.target_modules:
            raise ValueError(
                f"trainer.lora.target_modules=[]: nothing would train; name some of {', '.join(_LORA_TARGETS)}"
            )
        for target in self.target_modules:
            if target in ("q_proj", "k_proj", "v_proj"):
                raise ValueError(
                    f"trainer.lora.target_modules={target!r}: query, key and value are one layer; use 'qkv_proj'"
                )
            if target not in _LORA_TARGETS:
                near = difflib.get_close_matches(target, _LORA_TARGETS, 1)
                raise ValueError(
                    f"trainer.lora.target_modules={target!r}: is not a layer that can have an adapter; "
                    + (f"did you mean {near[0]!r}?" if near else f"use some of {', '.join(_LORA_TARGETS)}")
                )


def _training() -> TrainingConfig:
    return TrainingConfig(mixed_precision_param="float32", seq_len=2048)


def _parallelism() -> ParallelismConfig:
    return ParallelismConfig(spmd_backend="partial_dtensor", data_parallel_shard_degree=1)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """A mesh of `parallelism` ranks that holds one model and trains it. The nested classes are torchtitan's own."""

    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of the whole model; None trains every parameter."""
    max_tokens_per_microbatch: int = 8192
    """Soft cap on packed tokens per forward; a longer datum gets a microbatch of its own."""
    training: TrainingConfig = field(default_factory=_training)
    """`seq_len` is the longest datum, `max_norm` the gradient clip, `mixed_precision_param` the compute dtype. In
    float32 on CUDA attention goes through torch's memory-efficient kernel, with key and value heads repeated for it."""
    parallelism: ParallelismConfig = field(default_factory=_parallelism)
    """Degrees multiply to the number of ranks; data_parallel_shard_degree must be given."""
    num_hosts: int = 1
    """Hosts the mesh spans; its ranks are divided evenly."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    compile: CompileConfig = field(default_factory=CompileConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """auto: variable-length FlashAttention on CUDA when computing in bfloat16 (all it knows), per-document
    scaled-dot-product elsewhere."""
    logprob_chunk_mib: int = 0
    """Memory that one chunk's float32 logits may take, per rank; log-probabilities are computed a chunk at a time. 0 is
    128 MiB on a CPU and 512 MiB on CUDA, where it has not been measured: there small chunks add often into the head's
    gradient (622 MB at a vocabulary of 151,936 and a hidden size of 1,024)."""
    num_threads: int = 0
    """CPU threads per rank; 0 shares a host's cores among the trainer's ranks there."""
    converters: list = field(default_factory=list)
    """torchtitan model-config converters (float8 for one), applied in order before the model is built; not LoRA's."""
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
    """Of the generator's parameters, and therefore of the weights sent to it; there is no other setting. In float32 on
    CUDA vLLM's attention is Triton's, which multiplies in TF32 (10 bits of mantissa): no float32 to compare with."""
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
    """True runs every step kernel by kernel. False captures decoding in CUDA graphs, one for each of a few batch sizes;
    prompts stay eager, and nothing is compiled. True is the default until graphs have been seen to work on a GPU."""
    model_runner: Literal["auto", "v1", "v2"] = "auto"
    """Which of vLLM's two model runners; auto leaves it to vLLM: on a GPU the second, on a CPU the first."""
    num_threads: int = 0
    """CPU threads per rank; 0 shares the cores among a replica's ranks."""


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights travel. Their dtype is the generator's; quantised transfer is a non-goal for now."""

    transport: Literal["auto", "shared_memory", "store"] = "auto"
    """Of the payload; TorchStore always owns version, manifest and handle. auto: shared memory if one host has both
    ends."""
    verify: bool = True
    """Generators check the payload's checksum before they load it."""

"""Configs of trainers and generators (`PolicyTrainer.Config`, `Generator.Config`), without importing either actor."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from torchtitan.config import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig

from torchtitan_rl.constraints import BETAS, Check, Hint

__all__ = [
    "LORA_TARGETS",
    "TORCHTITAN_FIELDS",
    "AdamWConfig",
    "LoRAConfig",
    "TrainerConfig",
    "GeneratorConfig",
    "WeightSyncConfig",
]


@dataclass(kw_only=True, slots=True)
class AdamWConfig:
    """AdamW over all trainable parameters, through torchtitan's optimizer container."""

    lr: Annotated[float, Ge(0)] = 1e-5
    """Peak learning rate; `algorithm.schedule` scales it."""
    betas: Annotated[tuple[float, float], BETAS] = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""
    eps: Annotated[float, Ge(1e-30), Hint("use 1e-8")] = 1e-8
    """Added to the denominator of every update. Without it a parameter that never had a gradient becomes NaN."""
    weight_decay: Annotated[float, Ge(0), Hint("use 0 for none")] = 0.0
    """Decoupled weight decay, times the learning rate per step; 0: none."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's AdamW implementations runs."""


LORA_TARGETS = ("qkv_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(kw_only=True, slots=True)
class LoRAConfig:
    """Low-rank adapters: only adapters train and are checkpointed. Example: `LoRAConfig(rank=16, alpha=32.0)`."""

    rank: Annotated[int, Ge(1)] = 8
    """Inner size of an adapter."""
    alpha: Annotated[float, Gt(0), Hint("use the rank, or twice the rank")] = 16.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Annotated[
        list[str], Check(bool, "nothing would train; name some of " + ", ".join(LORA_TARGETS))
    ] = field(default_factory=lambda: list(LORA_TARGETS))
    """Layers with an adapter: qkv_proj (query, key and value are one layer), o_proj, gate_proj, up_proj, down_proj."""


def _is_one(degree: int) -> bool:
    return degree == 1


def _leaves_gradients(max_norm: float) -> bool:
    return max_norm > 0


def _runs_everywhere(spmd_backend: str) -> bool:
    return spmd_backend == "partial_dtensor"


TORCHTITAN_FIELDS: dict[type, dict[str, Any]] = {
    TrainingConfig: {
        "max_norm": Annotated[
            float | None, Check(_leaves_gradients, "would scale every gradient to 0; use None for no clip")
        ]
    },
    ParallelismConfig: {
        "data_parallel_replicate_degree": Annotated[int, Ge(1)],
        "data_parallel_shard_degree": Annotated[int, Ge(1)],
        "tensor_parallel_degree": Annotated[int, Ge(1)],
        "pipeline_parallel_degree": Annotated[int, Check(_is_one, "is not supported; use 1")],
        "context_parallel_degree": Annotated[int, Check(_is_one, "is not supported; use 1")],
        "expert_parallel_degree": Annotated[int, Ge(1)],
        "spmd_backend": Annotated[
            str, Check(_runs_everywhere, "use 'partial_dtensor', the backend that runs on gloo as well as on NCCL")
        ],
    },
}
"""Class of torchtitan -> the types and constraints of fields, where a run here takes other values than torchtitan."""


def _training() -> TrainingConfig:
    return TrainingConfig(mixed_precision_param="float32", seq_len=0)


def _parallelism() -> ParallelismConfig:
    return ParallelismConfig(spmd_backend="partial_dtensor", data_parallel_shard_degree=1)


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """A mesh of `parallelism` ranks that holds one model and trains it.

    `training`, `parallelism`, `compile`, `comm` and `debug` are torchtitan's own config classes.
    """

    optimizer: AdamWConfig = field(default_factory=AdamWConfig)
    """Settings of AdamW; `supervised.lr` and `supervised.betas` apply during the warm start."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters instead of the whole model; None trains every parameter."""
    max_tokens_per_microbatch: Annotated[int, Ge(0), Hint("use 0 for the device's own number")] = 0
    """Tokens packed into one forward at most; a longer datum gets a microbatch of its own. 0: 4,096 on a CPU, where
    more gain nothing and hold more memory, and 8,192 on CUDA, where fewer would wait for launches. The controller's
    device counts, which may be another than the trainer's."""
    training: TrainingConfig = field(default_factory=_training)
    """`seq_len` is the longest datum in tokens (0: as long as the sampling limits allow), `max_norm` the gradient clip
    (None: no clip), `mixed_precision_param` the compute dtype. In float32 on CUDA, attention runs torch's
    memory-efficient kernel on repeated key and value heads."""
    parallelism: ParallelismConfig = field(default_factory=_parallelism)
    """The product of the degrees is the number of ranks; `data_parallel_shard_degree` must be given."""
    num_hosts: Annotated[int, Ge(1)] = 1
    """Hosts that the mesh spans, each with an equal number of ranks."""
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    """Which activations the backward recomputes instead of keeping: none, those of selected operators, or all."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    attention: Literal["auto", "sdpa", "varlen"] = "auto"
    """`varlen` is variable-length FlashAttention (CUDA and bfloat16 only), `sdpa` torch's scaled-dot-product attention,
    one document at a time. `auto` takes `varlen` on CUDA in bfloat16, `sdpa` elsewhere and for models with sinks, whose
    attention `sdpa` computes by definition, in float32."""
    shared_prefix: Literal["off", "auto"] = "off"
    """`auto` computes the prompt of siblings once, where an estimate says that this takes less time; `off` computes it
    in every datum. Outputs and gradients are the same up to rounding. Only on a CPU so far: on CUDA every datum is
    computed whole. The metric `prompt/repeated_frac` says how much there is to save."""
    logprob_chunk_mib: Annotated[int, Ge(0), Hint("use 0 for the device's own size")] = 0
    """Size of one chunk's float32 logits, in MiB per rank; log-probabilities are computed a chunk at a time. 0: 128 on
    a CPU, 2,048 on CUDA. Every chunk adds into the head's gradient (622 MB at a vocabulary of
    151,936 and a hidden size of 1,024), so small chunks move that memory often."""
    logprob_kernels: Literal["auto", "off"] = "auto"
    """`auto` computes log-probabilities and their gradients by Triton kernels on CUDA, which read a chunk's logits four
    times and write them two or three times, where torch's operators do so some twenty times; `off` uses torch's
    operators, as a CPU always does. Outputs and gradients are the same up to rounding."""
    num_threads: Annotated[int, Ge(0), Hint("use 0 to share the cores among the ranks")] = 0
    """CPU threads per rank; 0: a host's cores, divided by the trainer's ranks on that host."""
    nice: Annotated[int | None, Ge(0), Le(19)] = None
    """Added to the niceness of the trainer's threads: where they compete for cores, the system gives more to threads
    that are less nice. For a lag above 0 where training takes longer than generation, with `num_threads` of all cores
    (docs/asynchrony.md). None: they are as nice as the process."""
    converters: list = field(default_factory=list)
    """torchtitan's model-config converters, such as float8's, applied in order before the model is built. For LoRA set
    `lora` instead."""
    post_optimizer_build_fn: Callable | None = None
    """Called with (optimizers, model parts, parallel dims) after the model spec's own function; None: no call."""

    @property
    def num_ranks(self) -> int:
        p = self.parallelism
        return p.data_parallel_replicate_degree * p.data_parallel_shard_degree * p.tensor_parallel_degree

    def of_role(self) -> TrainerConfig:
        """The trainer of a role that names none: a copy of this one, the policy's, without adapters."""
        return dataclasses.replace(copy.deepcopy(self), lora=None)


@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    """vLLM engines that sample from the policy."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the generator's parameters, and so of every weight that a trainer sends. In float32 on CUDA, vLLM's
    attention runs Triton kernels that multiply in TF32 (10 bits of mantissa), which is less exact than float32."""
    tensor_parallel_degree: Annotated[int, Ge(1)] = 1
    """Ranks of one replica, by tensor parallelism; 1: the model is not cut."""
    num_replicas: Annotated[int, Ge(1)] = 1
    """Generators with the same weights, each on a mesh of its own."""
    max_replicas: Annotated[int | None, Ge(1)] = None
    """Where requests wait for a place in an engine, replicas join, up to so many; where fewer would do, they leave
    again, down to `num_replicas`. By the mean of the last minute. None: the number changes on request alone
    (`torchtitan-rl scale`)."""
    max_model_len: Annotated[int, Ge(0), Hint("use 0 for what the sampling limits allow")] = 0
    """Longest sequence in tokens, prompt and completion together; 0: what the sampling limits allow."""
    max_num_seqs: Annotated[int, Ge(1)] = 256
    """Sequences that one replica decodes at once."""
    max_num_batched_tokens: int = 16384
    """Tokens that one engine iteration computes at most, prompts and decoding together; at least `max_model_len`. What
    is left of a prompt goes into the next iteration; on a CPU the whole prompt does. Above `max_num_seqs` x
    `max_model_len`, which no iteration can have, it changes nothing."""
    kv_cache_gib: float = 1.0
    """Size of the KV cache, in GiB per rank."""
    model_impl: Literal["torchtitan", "vllm"] = "torchtitan"
    """`torchtitan` runs the trainer's model inside vLLM; `vllm` runs vLLM's own model of the family."""
    enforce_eager: bool | None = None
    """True runs every step kernel by kernel. False captures decoding in CUDA graphs, one for each of a few batch sizes;
    prompts stay eager, and nothing is compiled unless `compile` says so. None: graphs on a GPU, for torchtitan's model
    on one rank; not for a family with states, and of a mixture of experts in bfloat16 on Hopper and Blackwell alone.
    On an H100 graphs decode 2 to 3 times as fast."""
    compile: bool = False
    """True compiles the decoder with torch.compile, as vLLM compiles its own models. On a CPU this fuses what is small
    in an iteration, and needs a C++ compiler. The start takes about a minute longer, with one forward of
    `max_num_batched_tokens` tokens; vLLM keeps what it has compiled in `VLLM_CACHE_ROOT` (~/.cache/vllm), by model
    directory, so that each new run compiles. On CUDA vLLM compiles the pieces between attention layers, and captures
    graphs as well unless `enforce_eager` forbids it (docs/gpu/h200.md). Not for families with states or experts,
    with `tensor_parallel_degree` above 1, or with `model_impl="vllm"`, where `enforce_eager=False` compiles."""
    model_runner: Literal["auto", "v1", "v2"] = "auto"
    """Which of vLLM's two model runners serves. `auto` is vLLM's choice: v2 on a GPU, v1 on a CPU."""
    async_scheduling: bool | None = None
    """True schedules an engine step while the device still computes the one before. Steps in flight end before new
    weights are loaded, so that every token is labelled with the version that sampled it. Needs a GPU, vLLM's V2 model
    runner and `tensor_parallel_degree=1`. None: as with `enforce_eager`. On an H100 it made decoding by graphs 1.5 to
    1.8 times as fast."""
    num_threads: Annotated[int, Ge(0), Hint("use 0 to share the cores among the ranks")] = 0
    """CPU threads per rank; 0: the cores divided by the ranks of a replica."""
    record_routing: bool | None = None
    """True: completions of a mixture of experts say to which experts each of their tokens was sent
    (`Completion.routed_experts`). The engine keeps a byte for each expert of a token, for each layer and each token
    that fits the KV cache. None: where `algorithm.expert_routing` needs it."""
    max_adapters: Annotated[int, Ge(0), Hint("use 0 to merge adapters into the weights that are sent")] = 0
    """With `trainer.lora`: versions of adapters that an engine holds side by side over one base, with requests of all
    of them in one batch. The base is sent once, and each version sends its adapters alone. A request keeps the version
    that it began with. At least 2: the version that is served, and the one that replaces it. 0: adapters are merged,
    and each version sends all weights; a decoded token costs less then."""
    adapters: LoRAConfig | None = None
    """What adapters an engine has room for; None: with `max_adapters` those of `trainer.lora`, else none."""
    verify_loaded: bool = True
    """After every load, each rank compares the weights that its model holds with the weights that were sent, bit for
    bit. Not with `model_impl="vllm"`, which packs weights in its own way."""
    on_update: Literal["keep", "recompute", "wait"] = "keep"
    """What new weights do to requests that are in the engine. `keep`: they go on with the attention cache of the old
    weights. `recompute`: their cache is computed again by the new weights, at the cost of a prefill each. `wait`: they
    end first, while later requests wait for the new weights; `controller.call_timeout_s` bounds the wait."""
    max_replica_restarts: Annotated[int, Ge(0), Hint("use 0 for no replacement")] = 3
    """Lost replicas that are replaced on their devices, within `restart_window_s`, before the run ends; 0: a lost
    replica stays lost, and the run ends with the last one. Not with `roles.colocation="all"`."""
    restart_window_s: Annotated[float, Gt(0), Hint("use seconds")] = 3600.0
    """Seconds over which `max_replica_restarts` counts."""
    num_spares: Annotated[int | None, Ge(0)] = None
    """Processes per run that have imported what a replica needs and wait to replace a lost one: a replacement then
    starts in a third of the time. They start once the generators have answered. Each takes some 0.6 GiB of host memory
    per rank of a replica. None: 1 where several replicas run on one machine and are replaced, else 0."""
    probe_every_s: Annotated[float, Gt(0), Hint("use seconds")] = 2.0
    """Seconds between two signs of life of a replica's engine."""
    hang_timeout_s: Annotated[float, Gt(0), Hint("use seconds")] = 120.0
    """Seconds without a sign of life after which a replica is lost. Longer than an engine's longest iteration."""

    @property
    def compiles_nothing(self) -> bool:
        """Whether vLLM on a CPU neither compiles its own model nor torchtitan's."""
        return self.enforce_eager is not False and not self.compile


@dataclass(kw_only=True, slots=True)
class WeightSyncConfig:
    """How weights travel from a trainer to the generators, in the generators' dtype; nothing is quantised."""

    transport: Literal["auto", "shared_memory", "store"] = "auto"
    """How the tensors travel: whole through the shared memory of one host, or in pieces from every trainer rank to each
    generator rank that needs them. TorchStore holds version, manifest and where the bytes lie in either case. `auto`
    takes shared memory in a run on this machine alone, else pieces (`store`), because further hosts may join a run
    with hosts."""
    verify: bool = True
    """Generators check the checksums of what they have fetched before they load it."""

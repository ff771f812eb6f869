"""Memory that a run needs on each device, by arithmetic.

Every term is a formula of shapes, dtypes and settings, except three constants named as allowances.
tests/unit/test_memory.py compares the terms of parameters, gradients, optimizer and activations with real tensors. A
trainer's sum was 9 to 27 per cent above the peak on an H100 (docs/gpu/h100.md); a generator's has not been compared.

Letters: T tokens of a microbatch, V vocabulary, D hidden size, Q and K sizes of all query heads and of all key heads, F
inner size of the feed-forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig, LoRAConfig, TrainerConfig
from torchtitan_rl.config.run import COLOCATION, RunConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.decoding import max_num_batched_tokens, runs_eager
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.model.shared_prefix import MAX_KEYS

__all__ = [
    "trainer_parts",
    "working_parts",
    "generator_parts",
    "run_parts",
    "gpu_bytes",
    "gpu_parts",
    "takes_turns",
    "layer_activations",
    "num_adapter_parameters",
    "PROCESS_BYTES",
    "GRAPHS_BYTES",
    "FRAGMENTATION",
]

_BYTES = {"float32": 4, "bfloat16": 2}

PROCESS_BYTES = 2**30
"""Allowance for a GPU process's memory besides tensors, which offloading does not free: CUDA context and kernels,
cuBLAS's workspaces, NCCL's buffers."""
GRAPHS_BYTES = 2**30
"""Allowance for a generator's CUDA graphs, which stay on the device while the generator sleeps."""
FRAGMENTATION = 0.05
"""Allowance for memory that torch's caching allocator reserves beyond tensors, as a fraction of the tensors' bytes. The
KV cache is allocated once and left out."""


def num_adapter_parameters(lora: LoRAConfig, shape: DecoderShape) -> int:
    """rank x (in + out) of each layer that has an adapter; query, key and value are one layer."""
    heads, kv_heads = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    ffn = shape.dim + shape.hidden_dim
    in_and_out = {
        "qkv_proj": shape.dim + heads + 2 * kv_heads,
        "o_proj": heads + shape.dim,
        "gate_proj": ffn,
        "up_proj": ffn,
        "down_proj": ffn,
    }
    return shape.n_layers * lora.rank * sum(in_and_out[target] for target in set(lora.target_modules))


def layer_activations(
    shape: DecoderShape, checkpoint: Literal["none", "selective", "full"], tensor_parallel: int = 1
) -> int:
    """Numbers per token, in the compute dtype, that one layer keeps from forward to backward on a rank.

    full: the layer's input.

    selective (torchtitan's `SelectiveAC`): the layer's input, attention's output, and the output of every second matrix
    product: query-key-value, gate, and the feed-forward's last. `SelectiveAC` recomputes the grouped products of
    experts: instead the layer keeps the rows that all-to-alls bring to the experts and take back (2 D per expert).

    none: for each of two norms the input, the normalised and the scaled states (3 D each); heads before and after
    norm and rotation (2 Q + 2 K); attention's dense copies of query, key and value, and attention's output dense and
    packed (3 Q + 2 K); gate, SiLU of the gate, up, and the product of SiLU and up (4 F); cosines and sines in float32.
    CUDA's fused norms and variable-length attention keep 2 D + Q less.

    Tensor parallelism cuts all of it but what a layer gathers or has not scattered yet: without checkpointing the two
    gathered inputs (2 D) and the cosines and sines, in `selective` the last product (D). `SelectiveAC` also keeps the
    two scattered sums.
    """
    dim, ffn = shape.dim, shape.hidden_dim
    heads, kv_heads = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    experts = shape.experts
    if checkpoint == "full":
        return dim // tensor_parallel
    if checkpoint == "selective":
        cut, whole = dim + 2 * heads + 2 * kv_heads, 0
        if experts is not None:
            cut += 2 * experts.top_k * dim
        else:
            cut, whole = cut + ffn, dim
        if tensor_parallel > 1:
            cut += 2 * dim
        return cut // tensor_parallel + whole
    # Each of a token's `top_k` experts keeps 4 F, and copies of the token on the way in and on the way out (4 D).
    feed_forward = 4 * ffn if experts is None else experts.top_k * (4 * ffn + 4 * dim)
    return (4 * dim + 5 * heads + 4 * kv_heads + feed_forward) // tensor_parallel + 2 * dim + 4 * shape.head_dim


def trainer_parts(
    config: TrainerConfig, shape: DecoderShape, *, trains: bool = True, device: str = "cuda", float32_head: bool = False
) -> dict[str, int]:
    """Bytes of one trainer rank. `parameters`, `gradients`, `optimizer`: the shards that stay between operations.
    `working`: the most that a forward and backward hold besides the shards (`working_parts`). `step`: the most that an
    optimizer step holds besides the shards, the need of AdamW's foreach implementation by torch's documentation, the
    parameters' size; the fused implementation needs nothing.

    `trains=False`: a role that only scores.
    """
    parallel, stored = config.parallelism, _BYTES[config.training.dtype]
    shards = parallel.data_parallel_shard_degree * parallel.tensor_parallel_degree
    num_parameters = num_trained = shape.num_parameters
    if config.lora is not None:
        num_trained = num_adapter_parameters(config.lora, shape)
        num_parameters += num_trained
    num_trained = num_trained if trains else 0
    return {
        "parameters": stored * num_parameters // shards,
        "gradients": stored * num_trained // shards,
        "optimizer": 2 * stored * num_trained // shards,  # two moments
        "working": sum(working_parts(config, shape, trains=trains, device=device, float32_head=float32_head).values()),
        "step": stored * num_trained // shards if config.optimizer.implementation == "foreach" else 0,
    }


class _Moment(NamedTuple):
    """Bytes held at one moment of forward and backward; see `working_parts`."""

    gathered: float
    activations: float
    logits: float
    passing: float


def working_parts(
    config: TrainerConfig, shape: DecoderShape, *, trains: bool = True, device: str = "cuda", float32_head: bool = False
) -> dict[str, int]:
    """Bytes that a forward and backward hold besides the shards when they hold most: `gathered` parameters,
    `activations`, `logits`, and `passing` gradients, before and after reduction.

    The largest of these moments, after torch's FSDP2 (all parameters of a group in the compute dtype and those of the
    group before, fetched ahead; gradients copied to float32 and reduced; a tied head and embedding are one group) and
    `model/logprobs.py`:

    - at the head: all activations, a chunk's logits, exponentials of logits and the chunk before (three in float32, one
      in the compute dtype; with kernels the logits in the compute dtype alone, with `float32_head` in float32 and their
      gradient), the head's gradient in float32 and in the compute dtype;
    - after a head that is not tied: all activations, the head's gradient before and after reduction;
    - in the last layer's feed-forward: all activations, what the layer recomputes, the gradients of two inner and two
      outer activations, of the feed-forward's last matrix and of the head;
    - after a layer: the activations of the layers before, the gradients of layer (before and after reduction) and head;
    - at the embedding: its gradient before and after reduction, or, tied, the head's, its own and the sum.
    """
    compute, parallel = _BYTES[config.training.mixed_precision_param], config.parallelism
    tp, tied = parallel.tensor_parallel_degree, shape.tie_embeddings
    tokens = max(platform.microbatch_tokens(config.max_tokens_per_microbatch, device), config.training.seq_len)
    table = shape.vocab_size * shape.dim // tp
    layer = (shape.num_parameters - shape.vocab_size * shape.dim * (1 if tied else 2)) // shape.n_layers // tp
    all_logits = tokens * shape.vocab_size * 4 // tp
    chunk = min(all_logits, platform.logprob_chunk_bytes(config.logprob_chunk_mib, device))
    if device == "cuda" and config.logprob_kernels == "auto":  # in place, in the compute dtype
        logits = chunk * (4 + compute if float32_head and compute < 4 else compute) // 4
    else:
        logits = chunk * (3 * 4 + (compute if compute < 4 else 0)) // 4
    prompt_copies = 0
    if config.shared_prefix != "off" and device == "cpu":  # keys and values of a prompt, in front of every sibling
        prompt_copies = tokens * compute * (MAX_KEYS - 1) * 2 * shape.n_kv_heads * shape.head_dim // tp
    per_layer = tokens * compute * layer_activations(shape, "none", tp) + prompt_copies
    if not trains:
        gathered = compute * (table * (1 if tied else 2) + 2 * layer)
        return {"gathered": gathered} | ({"activations": per_layer} if per_layer > logits else {"logits": logits})
    kept = tokens * compute * layer_activations(shape, config.activation_checkpoint, tp)
    kept += prompt_copies if config.activation_checkpoint == "none" else 0
    activations = shape.n_layers * kept + tokens * compute * (2 * shape.dim // tp + shape.dim)  # and of the last norm
    used, num_experts = (1, 1) if shape.experts is None else (shape.experts.top_k, shape.experts.num_experts)
    gradients = tokens * compute * (2 * used * shape.hidden_dim // tp + 2 * shape.dim)
    layers_gathered = 1 if parallel.data_parallel_shard_degree == 1 else 2  # one rank fetches nothing ahead
    reduced = compute + 4 + 4 / parallel.data_parallel_shard_degree  # bytes of a gradient before and after
    weights, matrix = compute * layer, compute * shape.dim * num_experts * shape.hidden_dim // tp
    head_gradient = table * (4 + (compute if compute < 4 else 0))
    unreduced = 4 * layer * (layers_gathered - 1)  # a group's copy in float32 lives until the next group is reduced
    if tied:
        head = compute * table
        moments = [
            # At the head.
            _Moment(head + weights, activations, logits, head_gradient),
            # In the last layer's feed-forward, after a layer, and at the embedding before and after the reduction.
            _Moment(head + layers_gathered * weights, activations + per_layer - kept + gradients, 0, head + matrix),
            _Moment(head + weights, activations - kept, 0, head + layer * reduced),
            _Moment(head, 0, 0, 3 * head + unreduced),
            _Moment(0, 0, 0, table * reduced + unreduced),
        ]
    else:
        moments = [
            # At the head and after it.
            _Moment(compute * table + weights, activations, logits, head_gradient),
            _Moment(weights, activations, 0, table * reduced),
            # In the last layer's feed-forward, after a layer, and at the embedding.
            _Moment(layers_gathered * weights, activations + per_layer - kept + gradients, 0, 4 * table + matrix),
            _Moment(weights, activations - kept, 0, 4 * table + layer * reduced),
            _Moment(0, 0, 0, table * reduced + unreduced),
        ]
    if config.lora is not None:  # a frozen base has no gradients
        moments = [moment._replace(passing=0) for moment in moments]
    largest = max(moments, key=sum)
    return {name: int(size) for name, size in largest._asdict().items()}


def generator_parts(
    config: GeneratorConfig, shape: DecoderShape, device: str = "cuda", *, float32_head: bool = False
) -> dict[str, int]:
    """Bytes of one generator rank: `weights` (embedding, head, norms and routers whole on every rank), `kv_cache`, and
    `working`: one layer's activations of an engine step's tokens, and three times the float32 logits of the sampled
    sequences. On a CPU also `packed`: the copies of all matrices but those of routed experts that are multiplied with
    (`engine.kernels`). With `max_adapters` also `adapters`: the slots, as one rank of a replica has them. `config` has
    its `max_model_len`, and its `adapters` where it has slots.
    """
    dtype, tensor_parallel = _BYTES[config.dtype], config.tensor_parallel_degree
    router = 0 if shape.experts is None else shape.experts.num_experts * shape.dim
    whole = shape.vocab_size * shape.dim * (1 if shape.tie_embeddings else 2) + shape.dim
    whole += shape.n_layers * (2 * shape.dim + shape.layer_extras + router)
    heads, kv_heads = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    feed_forward = 3 * shape.hidden_dim
    if shape.experts is not None:
        feed_forward = shape.experts.top_k * (3 * shape.hidden_dim + 2 * shape.dim)
    per_token = 4 * shape.dim + 2 * (heads + 2 * kv_heads) + feed_forward
    packed = {}
    if device == "cpu" and config.model_impl == "torchtitan":
        if packs := platform.packs_matrices(getattr(torch, config.dtype)):
            num_experts = 0 if shape.experts is None else shape.experts.num_experts
            experts = shape.num_mixture_layers * num_experts * 3 * shape.dim * shape.hidden_dim
            packed["packed"] = dtype * ((shape.num_parameters - whole - experts) // tensor_parallel)
        if packs or float32_head:  # the head, also one that is tied
            head = (4 if float32_head else dtype) * shape.vocab_size * shape.dim
            packed["packed"] = packed.get("packed", 0) + head
    slots = {}
    if config.max_adapters and config.adapters is not None:
        slots["adapters"] = dtype * config.max_adapters * num_adapter_parameters(config.adapters, shape)
    return (
        packed
        | {
            "weights": dtype * (whole + (shape.num_parameters - whole) // tensor_parallel),
            "kv_cache": int(config.kv_cache_gib * 2**30),
            "working": dtype * max_num_batched_tokens(config) * per_token
            + 3 * 4 * config.max_num_seqs * shape.vocab_size,
        }
        | slots
    )


def run_parts(config: RunConfig, device: str = "cuda") -> dict[str, dict[str, int]]:
    """Bytes by role and part, for one rank of every role; `generator` is one rank of one replica."""
    return {
        role: trainer_parts(
            trainer,
            resolve_shape(model),
            trains=role in ("policy", "critic"),
            device=device,
            float32_head=model.float32_head,
        )
        for role, (trainer, model) in config.trainers().items()
    } | {
        "generator": generator_parts(
            config.generator, resolve_shape(config.model), device, float32_head=config.model.float32_head
        )
    }


def gpu_bytes(config: RunConfig, roles: Iterable[str], parts: dict[str, dict[str, int]] | None = None) -> int:
    """The most bytes that one rank of each mesh in `roles` (`policy`, `generator-0`, ...) hold at once on one GPU."""
    return sum(gpu_parts(config, roles, parts).values())


def gpu_parts(
    config: RunConfig, roles: Iterable[str], parts: dict[str, dict[str, int]] | None = None
) -> dict[str, int]:
    """Bytes at once on one GPU, in parts: `tensors`, `fragmentation`, `processes`, `cuda_graphs`.

    Roles that `roles.colocation` names take turns (`dispatch/placement.py`): the largest turn counts. A pull is a turn
    too, with the generators' weights beside the policy's parameters. Other roles stay on the GPU all the time. The
    allowances for processes, CUDA graphs and fragmentation come on top. `parts`: the result of `run_parts`.
    """
    parts, roles = parts or run_parts(config), list(roles)
    sharing = COLOCATION[config.roles.colocation]
    generators = [role for role in roles if _kind(role) == "generator"]
    turns, at_once, kv_cache = [0], 0, 0
    for role in roles:
        if role not in generators:
            peak = _trainer_peak(parts[role], optimizer_away=role == "policy" and _optimizer_is_away(config))
            if role in sharing and len(roles) > 1:
                turns.append(peak)
            else:
                at_once += peak
    if generators:
        generator = parts["generator"]
        sampling = len(generators) * sum(generator.values())
        cache = len(generators) * generator["kv_cache"]
        if "generator" in sharing and len(roles) > len(generators):
            if "policy" in roles:
                turns.append(len(generators) * generator["weights"] + parts["policy"]["parameters"])
            if sampling > max(turns):
                kv_cache = cache
            turns.append(sampling)
        else:
            at_once += sampling
            kv_cache = cache
    tensors = at_once + max(turns)
    eager = runs_eager(config.generator, resolve_shape(config.model))
    return {
        "tensors": tensors,
        "fragmentation": int(FRAGMENTATION * (tensors - kv_cache)),
        "processes": PROCESS_BYTES * len(roles),
        "cuda_graphs": 0 if eager else GRAPHS_BYTES * len(generators),
    }


def takes_turns(config: RunConfig, roles: Iterable[str]) -> list[str]:
    """The meshes among `roles` that take turns on a GPU that they share (`roles.colocation`)."""
    sharing = COLOCATION[config.roles.colocation]
    turns = [role for role in roles if _kind(role) in sharing]
    return turns if len(turns) > 1 else []


def _kind(role: str) -> str:
    """The role that a mesh belongs to: `generator` for `generator-3`."""
    return "generator" if role.startswith("generator") else role


def _trainer_peak(parts: dict[str, int], *, optimizer_away: bool) -> int:
    shards = parts["parameters"] + parts["gradients"]
    return max(
        shards + parts["working"] + (0 if optimizer_away else parts["optimizer"]),
        shards + parts["optimizer"] + parts["step"],
    )


def _optimizer_is_away(config: RunConfig) -> bool:
    """Whether the optimizer is in host memory during every forward and backward of the policy, because the generators
    take the device after each policy step. Earlier phases and later minibatches find the optimizer on the device."""
    early = config.supervised.num_steps > 0 or config.preference is not None
    return config.roles.colocation == "all" and config.algorithm.steps_per_batch == 1 and not early

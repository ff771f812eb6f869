"""What a config resolves to, and roughly how much memory each process of the run will need."""

from __future__ import annotations

from torchtitan_rl import platform
from torchtitan_rl.config.actors import LoRAConfig
from torchtitan_rl.config.model import Qwen3Shape
from torchtitan_rl.config.resolve import flat, function_name
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.model.shape import resolve_shape

__all__ = ["show", "memory_estimate"]

_BYTES = {"float32": 4, "bfloat16": 2}


def _num_adapter_parameters(lora: LoRAConfig, shape: Qwen3Shape) -> int:
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


def memory_estimate(config: RunConfig, shape: Qwen3Shape) -> dict[str, int]:
    """Bytes of one process of each kind: weights, gradients, optimizer, activations, KV cache. Code is not counted
    (about 0.6 GB for a trainer, 0.9 GB for a generator, on a CPU)."""
    parallel, training = config.trainer.parallelism, config.trainer.training
    shards = parallel.data_parallel_shard_degree * parallel.tensor_parallel_degree
    stored, compute = _BYTES[training.dtype], _BYTES[training.mixed_precision_param]
    tokens = config.trainer.max_tokens_per_microbatch
    # Saved for backward, per token and layer: about 18 hidden-size and 4 feed-forward-size vectors. Each expert a token
    # goes to takes its own, with the token's copy on the way in and on the way out.
    per_layer = 18 * shape.dim + 4 * shape.hidden_dim
    if shape.experts is not None:
        per_layer = 18 * shape.dim + shape.experts.top_k * (4 * shape.hidden_dim + 4 * shape.dim)
    if config.trainer.activation_checkpoint != "none":
        per_layer = 2 * shape.dim
    activations = tokens * shape.n_layers * per_layer * compute // parallel.tensor_parallel_degree
    # In the compute dtype, in float32, and their exponentials.
    all_logits = tokens * shape.vocab_size * 4 // parallel.tensor_parallel_degree
    logits = 3 * min(all_logits, platform.logprob_chunk_bytes(config.trainer.logprob_chunk_mib))
    held = trained = shape.num_parameters
    if config.trainer.lora is not None:
        trained = _num_adapter_parameters(config.trainer.lora, shape)
        held += trained
    trainer = stored * (held + 3 * trained) // shards + activations + logits  # what trains has a gradient, two moments
    weights = _BYTES[config.generator.dtype] * shape.num_parameters
    generator = weights // config.generator.tensor_parallel_degree + int(config.generator.kv_cache_gib * 2**30)
    return {"trainer rank": trainer, "generator rank": generator, "weights in the store, per live version": weights}


def show(config: RunConfig) -> None:
    """Prints every field as the flag that would set it, then the memory estimate."""
    for path, value in flat(config):
        text = function_name(value) if callable(value) else repr(value) if isinstance(value, str) else str(value)
        if isinstance(value, (tuple, list)):
            text = " ".join(map(str, value)) or "[]"
        print(f"--{path.replace('_', '-')} {text}")
    shape = resolve_shape(config.model)
    print(f"\nmodel: {shape.num_parameters:,} parameters")
    if config.trainer.lora is not None:
        print(f"adapters: {_num_adapter_parameters(config.trainer.lora, shape):,} parameters, which alone train")
    for name, size in memory_estimate(config, shape).items():
        print(f"memory, {name}: about {size / 2**30:.2f} GiB")
    print(
        f"processes: {config.trainer.num_ranks} trainer, "
        f"{config.generator.num_replicas} x {config.generator.tensor_parallel_degree} generator, 1 store, 1 controller"
    )

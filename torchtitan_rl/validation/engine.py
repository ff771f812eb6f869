"""Checks for settings that vLLM would refuse only after its start or at its first sample."""

from __future__ import annotations

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.shape import kv_bytes_per_token

__all__ = ["check_engine"]


def check_engine(generator: GeneratorConfig, shape: DecoderShape) -> None:
    """Raises ValueError for a head, a batch or a cache that the generator's engine cannot work with."""
    if (dims := platform.head_dims()) and shape.head_dim not in dims:
        raise ValueError(
            f"model.shape.head_dim={shape.head_dim}: the generator's attention on a CPU has no kernel for it; use one "
            f"of {', '.join(map(str, dims))}"
        )
    tokens = max(generator.max_num_batched_tokens, generator.max_model_len)
    if tokens < generator.max_num_seqs:
        raise ValueError(
            f"generator.max_num_batched_tokens={generator.max_num_batched_tokens}: is less than generator.max_num_seqs="
            f"{generator.max_num_seqs}, and each of these sequences decodes a token in one iteration; raise it, or "
            "lower max_num_seqs"
        )
    per_token = kv_bytes_per_token(generator, shape)
    if not generator.kv_cache_gib * 2**30 >= per_token * generator.max_model_len:
        capacity = int(max(0.0, generator.kv_cache_gib) * 2**30 / per_token)  # max(0, NaN) is 0
        raise ValueError(
            f"generator.kv_cache_gib={generator.kv_cache_gib:g}: holds {capacity} tokens of {per_token} bytes a rank, "
            f"less than one sequence of generator.max_model_len={generator.max_model_len}; use at least "
            f"{per_token * generator.max_model_len / 2**30:.3g}, or lower max_model_len"
        )

"""Checks for settings that vLLM would refuse only after its start or at its first sample."""

from __future__ import annotations

import importlib.util

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.shape import kv_bytes_per_token, state_bytes

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
    per_token, states = kv_bytes_per_token(generator, shape), state_bytes(generator, shape)
    if not generator.kv_cache_gib * 2**30 >= states + per_token * generator.max_model_len:
        capacity = max(0, int((max(0.0, generator.kv_cache_gib) * 2**30 - states) / per_token))  # max(0, NaN) is 0
        raise ValueError(
            f"generator.kv_cache_gib={generator.kv_cache_gib:g}: holds {capacity} tokens of {per_token} bytes a rank"
            f"{f' beside {states} bytes of states' if states else ''}, less than one sequence of "
            f"generator.max_model_len={generator.max_model_len}; use at least "
            f"{(states + per_token * generator.max_model_len) / 2**30:.3g}, or lower max_model_len"
        )
    if shape.state_sizes:
        _check_states(generator, shape)


def _check_states(generator: GeneratorConfig, shape: DecoderShape) -> None:
    """Raises ValueError for settings with which layers that keep states cannot be run."""
    if not generator.enforce_eager:
        raise ValueError(
            f"generator.enforce_eager=False: layers of a {shape.name} lay out each step's requests on the host, which "
            "a CUDA graph cannot capture; use True"
        )
    if generator.model_impl == "vllm" and platform.device_type() == "cpu" and generator.dtype != "bfloat16":
        raise ValueError(
            f"generator.model_impl='vllm': vLLM's own {shape.name} computes in bfloat16 alone on a CPU, and "
            f"generator.dtype={generator.dtype!r}; use model_impl='torchtitan', or dtype='bfloat16'"
        )
    if generator.model_impl == "vllm" and importlib.util.find_spec("torchvision") is None:
        raise ValueError(
            f"generator.model_impl='vllm': vLLM's own {shape.name} is in one module with the whole model, which "
            "imports torchvision, and that is not installed; install torchvision, or use model_impl='torchtitan'"
        )

"""A generator's config in vLLM's terms."""

from __future__ import annotations

from typing import Any

from vllm import EngineArgs
from vllm.config import StructuredOutputsConfig

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.engine import vllm_model
from torchtitan_rl.families import DecoderShape
from torchtitan_rl.model.decoding import max_num_batched_tokens, runs_eager, schedules_ahead
from torchtitan_rl.model.shape import resolve_shape

__all__ = ["engine_args"]

# Graphs of decoding, and nothing compiled, in either of vLLM's model runners.
_CAPTURE_DECODING = {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}


def engine_args(config: GeneratorConfig, model: ModelConfig, seed: int, *, sleeps: bool = False) -> EngineArgs:
    """vLLM's arguments for one rank. `model.assets` is a directory with a config.json and the tokenizer. `sleeps`: the
    engine shares devices with trainers."""
    shape = resolve_shape(model)
    eager = runs_eager(config, shape)
    return EngineArgs(
        model=model.assets,
        additional_config=vllm_model.EngineShape(
            shape,
            record_routing=bool(config.record_routing),
            float32_head=model.float32_head,
            adapters=config.adapters if config.max_adapters else None,
            num_adapters=config.max_adapters,
        ),
        dtype=config.dtype,
        load_format="dummy",
        seed=seed,
        hf_overrides=_overrides(config, model, shape),
        tensor_parallel_size=config.tensor_parallel_degree,
        distributed_executor_backend="external_launcher" if config.tensor_parallel_degree > 1 else None,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens(config),
        enable_chunked_prefill=platform.can_cut_prompts(),
        async_scheduling=schedules_ahead(config, shape),
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
        gpu_memory_utilization=0.1,  # bounds only the memory free at the start: kv_cache_memory_bytes sizes the cache
        enforce_eager=eager and not config.compile,
        # vLLM tunes FlashInfer's kernels at the start, of which torchtitan's model has none.
        enable_flashinfer_autotune=None if config.model_impl == "vllm" else False,
        compilation_config=_compilation(config, eager),
        enable_sleep_mode=sleeps and platform.can_sleep(),
        # A state is of all tokens before it: vLLM could share states at the ends of blocks alone, and only where it may
        # cut prompts there.
        enable_prefix_caching=not shape.state_sizes,
        # One for all requests: vLLM keeps the backend of the first, and `auto` would check later ones against another.
        structured_outputs_config=StructuredOutputsConfig(backend="xgrammar"),
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",  # of the sampling distribution, after temperature
        max_logprobs=-1,  # `Request.top_k` may be as large as the vocabulary
    )


def _overrides(config: GeneratorConfig, model: ModelConfig, shape: DecoderShape) -> dict[str, Any]:
    """What vLLM reads otherwise than in the directory's config.json."""
    if config.model_impl == "torchtitan":
        return {"architectures": [vllm_model.model_class(shape).__name__]}
    overrides: dict[str, Any] = {"tie_word_embeddings": False}  # a reload does not refresh a tied head
    if model.float32_head:
        overrides["head_dtype"] = "float32"
    return overrides


def _compilation(config: GeneratorConfig, eager: bool) -> dict[str, str]:
    """What differs from vLLM's default, which compiles and captures unless `enforce_eager` forbids both."""
    if config.compile:
        return {"cudagraph_mode": "NONE"} if eager else {}
    return _CAPTURE_DECODING if config.model_impl == "torchtitan" and not eager else {}

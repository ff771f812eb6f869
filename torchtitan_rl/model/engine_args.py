"""A generator's config in vLLM's terms."""

from __future__ import annotations

from vllm import EngineArgs

from torchtitan_rl import platform
from torchtitan_rl.config.actors import GeneratorConfig
from torchtitan_rl.model import vllm_model

__all__ = ["engine_args"]

# What vLLM's default (compiled pieces, and graphs) comes down to for a class without `@support_torch_compile`, in its
# second model runner; said outright, so that the first does the same and neither tries to compile.
_CAPTURE_DECODING = {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}


def engine_args(config: GeneratorConfig, model_dir: str, seed: int, *, sleeps: bool = False) -> EngineArgs:
    """vLLM's arguments for one rank. `sleeps`: the engine shares its devices with trainers."""
    return EngineArgs(
        model=model_dir,
        dtype=config.dtype,
        load_format="dummy",
        seed=seed,
        hf_overrides={"architectures": [vllm_model.ARCHITECTURE]}
        if config.model_impl == "torchtitan"
        else {"tie_word_embeddings": False},  # a reload does not refresh a tied head
        tensor_parallel_size=config.tensor_parallel_degree,
        distributed_executor_backend="external_launcher" if config.tensor_parallel_degree > 1 else None,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_model_len),
        # vLLM's default on CUDA. A step that is in flight when weights are loaded comes out after the load: its tokens,
        # drawn from the old weights, would be labelled with the new version.
        async_scheduling=False,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
        gpu_memory_utilization=0.1,  # only what must be free at the start: the cache's size is given above
        enforce_eager=config.enforce_eager,
        compilation_config=_CAPTURE_DECODING if config.model_impl == "torchtitan" and not config.enforce_eager else {},
        enable_sleep_mode=sleeps and platform.can_sleep(),
        enable_prefix_caching=True,
        disable_log_stats=True,
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled from, after temperature
        max_logprobs=-1,  # as many of the likeliest tokens as the vocabulary has may be scored
    )

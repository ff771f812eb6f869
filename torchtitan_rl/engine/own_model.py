"""vLLM alone: its own model of a Hugging Face directory, whose safetensors it loads itself."""

from __future__ import annotations

from pathlib import Path

from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as EngineSamplingParams
from vllm.inputs.engine import tokens_input

from torchtitan_rl import adapters
from torchtitan_rl.engine import vllm_internals

__all__ = ["greedy_tokens"]


def greedy_tokens(directory: Path, prompts: list[list[int]], max_tokens: int, *, max_model_len: int) -> list[list[int]]:
    """The greedy completions of the prompts in float32, of `max_tokens` tokens each. The engine is gone afterwards, and
    so is this process's process group."""
    args = EngineArgs(
        model=str(directory),
        dtype="float32",
        max_model_len=max_model_len,
        kv_cache_memory_bytes=2**28,
        gpu_memory_utilization=0.1,  # as in engine.arguments
        enforce_eager=True,
        disable_log_stats=True,
    )
    with adapters.private_shared_memory(), adapters.nameless_semaphores(), adapters.zeroed_blocks():
        engine = LLMEngine.from_engine_args(args)
    try:
        params = EngineSamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), tokens_input(prompt), params)
        completions: dict[int, list[int]] = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    completions[int(output.request_id)] = list(output.outputs[0].token_ids)
        return [completions[index] for index in range(len(prompts))]
    finally:
        vllm_internals.shut_down(engine)

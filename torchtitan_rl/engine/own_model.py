"""vLLM alone: its own model of a Hugging Face directory, whose safetensors it loads itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as EngineSamplingParams
from vllm.inputs.engine import tokens_input

from torchtitan_rl import adapters
from torchtitan_rl.engine import vllm_internals

__all__ = ["VllmAlone", "greedy_tokens"]


class VllmAlone:
    """An engine that the calling thread drives. Nothing of this package is between it and its caller."""

    def __init__(
        self,
        directory: Path,
        *,
        dtype: str,
        max_model_len: int,
        kv_cache_bytes: int,
        max_num_seqs: int | None = None,
        eager: bool = True,
    ) -> None:
        """`max_num_seqs` None: vLLM's default. `eager` False: vLLM compiles the model, and captures it where there is a
        GPU."""
        args = EngineArgs(
            model=str(directory),
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_memory_bytes=kv_cache_bytes,
            gpu_memory_utilization=0.1,  # as in engine.arguments
            enforce_eager=eager,
            disable_log_stats=True,
        )
        with adapters.private_shared_memory(), adapters.nameless_semaphores():
            self._engine = LLMEngine.from_engine_args(args)

    def complete(self, prompts: Sequence[list[int]], params: Sequence[EngineSamplingParams]) -> list[list[int]]:
        """The completion of each prompt."""
        for index, (prompt, prompt_params) in enumerate(zip(prompts, params, strict=True)):
            self._engine.add_request(str(index), tokens_input(prompt), prompt_params)
        completions: dict[int, list[int]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    completions[int(output.request_id)] = list(output.outputs[0].token_ids)
        return [completions[index] for index in range(len(prompts))]

    def sample(self, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        """A completion of each prompt of so many tokens, at temperature 1, with the log-probability of each token. All
        requests draw from the engine's random numbers, which is cheaper than a seed for each."""
        params = [
            EngineSamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False) for length in lengths
        ]
        return self.complete(prompts, params)

    def close(self) -> None:
        """Frees the engine's memory and this process's process group."""
        vllm_internals.shut_down(self._engine)


def greedy_tokens(directory: Path, prompts: list[list[int]], max_tokens: int, *, max_model_len: int) -> list[list[int]]:
    """The greedy completions of the prompts in float32, of `max_tokens` tokens each. The engine is gone afterwards, and
    so is this process's process group."""
    with adapters.zeroed_blocks():
        engine = VllmAlone(directory, dtype="float32", max_model_len=max_model_len, kv_cache_bytes=2**28)
    try:
        params = EngineSamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        return engine.complete(prompts, [params] * len(prompts))
    finally:
        engine.close()

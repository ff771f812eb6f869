"""Every use of vLLM beyond the public interface, in one module but for the draw of tokens.

Checked against vLLM 0.32, which has two model runners: V1 (`vllm/v1/worker/gpu_model_runner.py`, and a subclass for a
CPU) and V2 (`vllm/v1/worker/gpu/model_runner.py`). vLLM takes V2 where Triton runs: on a GPU, not on a CPU.

| touched | V1 | V2 |
|---|---|---|
| `model_executor.driver_worker.worker.model_runner` | the runner | the runner |
| `runner.get_model()` | the model; `runner.model` may be a wrapper that replays CUDA graphs | `runner.model` |
| `runner.reload_weights(weights_iterator=...)` | in place, by Hugging Face's names, resets caches | as V1 |
| `vllm_config.use_v2_model_runner`, `VLLM_USE_V2_MODEL_RUNNER` | selects the runner | as V1 |
| `output_processor.request_states[...].detokenizer.output_token_ids` | tokens so far; above the runner | as V1 |
| `engine_core.shutdown()`, `envs.disable_envs_cache()` | above the runner | as V1 |
| `get_tp_group().broadcast_object`, `.cpu_group` | above the runner | as V1 |
| `_CPUSHMDistributed.make_group_name` | CPU ranks | not used on a GPU |
| `runner.sampler.topk_topp_sampler.forward` | replaced in `noise.py` | draws by seed and position itself |
| `runner.input_batch`: `logitsprocs`, `num_tokens_no_spec`, `num_prompt_tokens` | read in `noise.py` | no |
| `KVCacheConfig.needs_kv_cache_zeroing` | replaced while an engine is built | as V1 |
| `torch.ops._C.fused_gumbel_argmax` | called in `noise.py`, on a CPU | no |

`vllm_model`'s `load_weights` and vLLM's `reload_weights` copy into the existing parameters. A captured CUDA graph holds
the addresses of these parameters and thus reads the new weights.
"""

from __future__ import annotations

import glob
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torchtitan.protocols.model_spec import ModelSpec
from vllm import LLMEngine, envs
from vllm.v1.kv_cache_interface import KVCacheConfig

from torchtitan_rl import platform

__all__ = [
    "chosen_model_runner",
    "runner",
    "model_runner",
    "model",
    "reload_weights",
    "num_sampled",
    "from_leader",
    "from_all",
    "shut_down",
    "zeroed_blocks",
    "private_shared_memory",
    "nameless_semaphores",
]

_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"


@contextmanager
def chosen_model_runner(choice: str) -> Iterator[None]:
    """Selects the model runner of an engine built in this context: `"v1"`, `"v2"`, or `"auto"` for vLLM's choice (or
    the user's environment variable). Restores the environment afterwards, for other engines of this process."""
    envs.disable_envs_cache()  # an engine built earlier has frozen vLLM's view of the environment; this engine will too
    before = os.environ.get(_CHOICE)
    if choice != "auto":
        os.environ[_CHOICE] = {"v1": "0", "v2": "1"}[choice]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CHOICE, None)
        else:
            os.environ[_CHOICE] = before


def runner(engine: LLMEngine) -> Any:
    """This rank's model runner."""
    return engine.model_executor.driver_worker.worker.model_runner


def model_runner(engine: LLMEngine) -> str:
    """The engine's model runner: `"v1"` or `"v2"`."""
    return "v2" if engine.vllm_config.use_v2_model_runner else "v1"


def model(engine: LLMEngine) -> torch.nn.Module:
    """This rank's model."""
    return runner(engine).get_model()


def reload_weights(engine: LLMEngine, spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces the weights of vLLM's own Qwen3, which takes Hugging Face's names and repacks weights; `tensors` are
    unsharded, under torchtitan's names."""
    of_hf = spec.state_dict_adapter(spec.model, None).to_hf(tensors) | {"lm_head.weight": tensors["lm_head.weight"]}
    runner(engine).reload_weights(weights_iterator=iter(of_hf.items()))


def num_sampled(engine: LLMEngine, engine_id: str) -> int:
    """How many tokens of an unfinished request have been sampled."""
    return len(engine.output_processor.request_states[engine_id].detokenizer.output_token_ids)


def from_leader(command: Any) -> Any:
    """Rank 0's object, on every tensor-parallel rank; a collective call."""
    from vllm.distributed import get_tp_group

    return get_tp_group().broadcast_object(command, src=0)


def from_all(answer: Any) -> list[Any]:
    """Every tensor-parallel rank's object, by rank; a collective call."""
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    answers: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(answers, answer, group=group.cpu_group)
    return answers


def shut_down(engine: LLMEngine) -> None:
    """Frees the engine's memory and this process's process groups."""
    engine.engine_core.shutdown()


@contextmanager
def nameless_semaphores() -> Iterator[None]:
    """Lets multiprocessing take the name of each semaphore away at its creation, as for the start method `fork`.

    vLLM's executor makes a lock that no other process opens. Monarch's processes have the start method `forkserver`:
    there a semaphore keeps its name in /dev/shm for as long as it lives, and a process that is killed together with its
    resource tracker leaves the name behind.
    """
    method = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)


@contextmanager
def zeroed_blocks() -> Iterator[None]:
    """Makes an engine that is built in this context zero a block of the attention cache before a request gets it, as
    vLLM does for models with a state.

    Attention reads whole blocks and masks what a request has not written: 0 times a NaN or an infinity that a request
    before left there is NaN. Other numbers change nothing, so what is computed from finite caches stays the same."""
    original = KVCacheConfig.needs_kv_cache_zeroing
    KVCacheConfig.needs_kv_cache_zeroing = property(lambda config: True)
    try:
        yield
    finally:
        KVCacheConfig.needs_kv_cache_zeroing = original


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """Names the shared memory of vLLM's CPU ranks uniquely on the host, and unlinks the name once all ranks have opened
    the segment.

    With `external_launcher` vLLM gives every engine the same name, and a killed engine leaves the name behind. The
    mesh's rendezvous port tells engines apart, and an open segment needs no name.
    """
    if platform.device_type() != "cpu" or "MASTER_PORT" not in os.environ:
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original, names = _CPUSHMDistributed.make_group_name, []

    def make_group_name(communicator) -> str:
        names.append(f"torchtitan_rl-{os.environ['MASTER_PORT']}{original(communicator).lstrip('/')}")
        return names[-1]

    _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)
        for name in names:
            for segment in Path("/dev/shm").glob(f"{glob.escape(name)}*"):
                segment.unlink(missing_ok=True)

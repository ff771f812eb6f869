"""What of vLLM is touched that is not its public interface: here and nowhere else.

Read in vLLM 0.32. It has two model runners, V1 (`vllm/v1/worker/gpu_model_runner.py`, and a subclass for a CPU) and
V2 (`vllm/v1/worker/gpu/model_runner.py`), and takes V2 where Triton runs, which a GPU means and a CPU does not.

| touched | V1 | V2 |
|---|---|---|
| `model_executor.driver_worker.worker.model_runner` | the runner | the runner |
| `runner.get_model()` | the model; `runner.model` may be a wrapper that replays CUDA graphs | `runner.model` |
| `runner.reload_weights(weights_iterator=...)` | in place, by Hugging Face's names, resets caches | the same |
| `vllm_config.use_v2_model_runner`, `VLLM_USE_V2_MODEL_RUNNER` | which of them runs | the same |
| `output_processor.request_states[...].detokenizer.output_token_ids` | tokens so far; above it | the same |
| `engine_core.shutdown()`, `envs.disable_envs_cache()` | above the runner | the same |
| `get_tp_group().broadcast_object` | above the runner | the same |
| `_CPUSHMDistributed.make_group_name` | CPU ranks | not used on a GPU |

Both `load_weights` of ours and `reload_weights` copy into the parameters that are there, so a captured CUDA graph,
which holds their addresses, goes on reading the right ones.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import LLMEngine, envs

from torchtitan_rl import platform

__all__ = [
    "chosen_model_runner",
    "model_runner",
    "model",
    "reload_weights",
    "num_sampled",
    "from_leader",
    "shut_down",
    "private_shared_memory",
]

_CHOICE = "VLLM_USE_V2_MODEL_RUNNER"


@contextmanager
def chosen_model_runner(which: str) -> Iterator[None]:
    """While an engine is built: `"v1"` or `"v2"` runs its model, with `"auto"` the one vLLM prefers (or that the user
    has set by environment). The environment is as before afterwards, for other engines of this process."""
    envs.disable_envs_cache()  # an engine built earlier in this process has frozen what vLLM reads; this one does again
    before = os.environ.get(_CHOICE)
    if which != "auto":
        os.environ[_CHOICE] = {"v1": "0", "v2": "1"}[which]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_CHOICE, None)
        else:
            os.environ[_CHOICE] = before


def _runner(engine: LLMEngine) -> Any:
    return engine.model_executor.driver_worker.worker.model_runner


def model_runner(engine: LLMEngine) -> str:
    """Which model runner the engine has: `"v1"` or `"v2"`."""
    return "v2" if engine.vllm_config.use_v2_model_runner else "v1"


def model(engine: LLMEngine) -> torch.nn.Module:
    """This rank's model."""
    return _runner(engine).get_model()


def reload_weights(engine: LLMEngine, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces the weights of one of vLLM's own models; whole tensors under Hugging Face's names."""
    _runner(engine).reload_weights(weights_iterator=iter(tensors.items()))


def num_sampled(engine: LLMEngine, engine_id: str) -> int:
    """How many tokens of an unfinished request have been sampled."""
    return len(engine.output_processor.request_states[engine_id].detokenizer.output_token_ids)


def from_leader(command: Any) -> Any:
    """Rank 0's object, on every tensor-parallel rank; a collective call."""
    from vllm.distributed import get_tp_group

    return get_tp_group().broadcast_object(command, src=0)


def shut_down(engine: LLMEngine) -> None:
    """Frees what the engine holds, the process groups of this process included."""
    engine.engine_core.shutdown()


@contextmanager
def private_shared_memory() -> Iterator[None]:
    """Shared memory of vLLM's CPU ranks: a name no other engine on the host has, gone as soon as all ranks hold it.

    With `external_launcher` vLLM gives every engine the same name and leaves it behind when killed. The mesh's
    rendezvous port tells engines apart, and a segment that is open needs no name.
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

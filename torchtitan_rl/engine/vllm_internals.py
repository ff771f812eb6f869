"""Uses of vLLM beyond the public interface. The table has those of other modules too, by the module's name.

Checked against vLLM 0.32, which has two model runners: V1 (`vllm/v1/worker/gpu_model_runner.py`, and a subclass for a
CPU) and V2 (`vllm/v1/worker/gpu/model_runner.py`). vLLM takes V2 where Triton runs: on a GPU, not on a CPU.

| touched | V1 | V2 |
|---|---|---|
| `model_executor.driver_worker.worker.model_runner` | the runner | the runner |
| `runner.get_model()` | the model; `runner.model` may be a wrapper that replays CUDA graphs | `runner.model` |
| `runner.reload_weights(weights_iterator=...)` | in place, by Hugging Face's names, resets caches | as V1 |
| `vllm_config.use_v2_model_runner`, `VLLM_USE_V2_MODEL_RUNNER` | selects the runner | as V1 |
| `output_processor.request_states[...].detokenizer.output_token_ids` | tokens so far; above the runner | as V1 |
| `engine_core.engine_core`: `batch_queue`, `scheduler.set_pause_state` | above the runner | as V1 |
| `scheduler`: `running`, `waiting`; `requests[...]`: `num_computed_tokens` | above the runner | as V1 |
| `runner.input_batch.req_ids` | the rows of the batch | the order of `scheduler.running` |
| `engine_core.shutdown()`, `envs.disable_envs_cache()` | above the runner | as V1 |
| `get_tp_group().broadcast_object`, `.cpu_group` | above the runner | as V1 |
| `parallel_state._groups`, `mq_broadcaster.buffer`: `is_creator`, `shared_memory` | above the runner | as V1 |
| `_CPUSHMDistributed.make_group_name` | replaced in `adapters.py`, CPU ranks | not used on a GPU |
| `runner.sampler.topk_topp_sampler.forward` | replaced in `noise.py` | draws by seed and position itself |
| `runner.kv_cache_config`, `runner.requests[...].block_ids` | a request's places in the cache | other names |
| `get_forward_context().slot_mapping` | read in `routing_record.py` | not used |
| `runner.query_start_loc.np`, `runner.input_batch.num_reqs` | read in `layer_adapters.py` | not used |
| `static_forward_context`, `attn_metadata[...]` | a state cache's, in `layers.py` | as V1 |
| `attention.impl.sinks` | read in `layers.py` | as V1 |
| `runner.input_batch`: `num_tokens_no_spec`, `num_prompt_tokens` | read in `noise.py` | no |
| `runner.input_batch.logitsprocs` | lengthened in `noise.py` and `layer_adapters.py` | no |
| `KVCacheConfig.needs_kv_cache_zeroing` | replaced in `adapters.py` while an engine is built | as V1 |
| `torch.ops._C.fused_gumbel_argmax` | called in `noise.py`, on a CPU | no |
| `torch.ops._C.silu_and_mul` | called in `kernels.py` | as V1 |
| `has_xgrammar_unsupported_json_features` | called in `structures.py` | as V1 |
| `_custom_ops`: `rms_norm`, `rotary_embedding` | called in `kernels.py` | as V1 |
| `support_torch_compile`, `ignore_torch_compile` | on the classes of `vllm_model.py` | as V1 |
| `_custom_ops`: `create_onednn_mm`, `onednn_mm`, `_supports_onednn` | called in `kernels.py`, on a CPU | no |

`vllm_model`'s `load_weights` and vLLM's `reload_weights` copy into the existing parameters. A captured CUDA graph holds
the addresses of these parameters and thus reads the new weights. Compiled code takes each parameter, and the handle of
each packed matrix, from its module at every call.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import LLMEngine, envs
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = [
    "chosen_model_runner",
    "runner",
    "model_runner",
    "model",
    "reload_weights",
    "finish_steps_in_flight",
    "num_sampled",
    "RequestPosition",
    "request_positions",
    "begin_at",
    "CacheGroup",
    "cache_group",
    "blocks",
    "from_leader",
    "from_all",
    "unlink_broadcast_memory",
    "shut_down",
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
    """Replaces the weights of vLLM's own model, which takes Hugging Face's names and repacks weights; `tensors` are
    unsharded, under torchtitan's names."""
    hf_tensors = spec.state_dict_adapter(spec.model, None).to_hf(tensors) | {
        "lm_head.weight": tensors["lm_head.weight"]
    }
    runner(engine).reload_weights(weights_iterator=iter(hf_tensors.items()))


def finish_steps_in_flight(engine: LLMEngine) -> list[Any]:
    """Ends the steps in flight of an engine that schedules ahead, without scheduling another; returns what they
    output."""
    core, outputs = engine.engine_core.engine_core, []
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    try:
        while core.batch_queue:
            outputs += engine.step()
    finally:
        core.scheduler.set_pause_state(PauseState.UNPAUSED)
    return outputs


def num_sampled(engine: LLMEngine, engine_id: str) -> int:
    """How many tokens of an unfinished request have been sampled."""
    return len(engine.output_processor.request_states[engine_id].detokenizer.output_token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPosition:
    """Where a request is in the engine, between two steps."""

    engine_id: str
    num_tokens: int = 0
    """Of its prompt, and sampled so far; 0: it has ended, and has its row of the batch until the next step."""
    num_computed: int = 0
    """Those whose keys and values the cache has."""
    preempted: bool = False
    """Whether its blocks of the cache were taken from it."""


def request_positions(engine: LLMEngine) -> list[RequestPosition]:
    """The rows of the next step's batch in order, and then the requests that wait in the queue."""
    scheduler = engine.engine_core.engine_core.scheduler
    rows = [request.request_id for request in scheduler.running]
    if model_runner(engine) == "v1":
        rows = list(runner(engine).input_batch.req_ids)
    waiting = [request.request_id for request in scheduler.waiting]
    requests = scheduler.requests
    return [
        RequestPosition(
            engine_id=engine_id,
            num_tokens=requests[engine_id].num_tokens,
            num_computed=requests[engine_id].num_computed_tokens,
            preempted=requests[engine_id].status == RequestStatus.PREEMPTED,
        )
        if engine_id in requests
        else RequestPosition(engine_id=engine_id)
        for engine_id in rows + [engine_id for engine_id in waiting if engine_id not in rows]
    ]


def begin_at(engine: LLMEngine, engine_id: str, num_computed: int) -> None:
    """Makes a request that waits for its first step begin after so many tokens. Their keys and values are whatever its
    blocks of the cache hold."""
    engine.engine_core.engine_core.scheduler.requests[engine_id].num_computed_tokens = num_computed


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose keys and values of a token lie at one slot of the cache."""

    index: int
    num_blocks: int
    block_size: int


def cache_group(engine: LLMEngine, attention_layer: str) -> CacheGroup:
    """The group of an attention layer, by vLLM's name of the layer."""
    config = runner(engine).kv_cache_config
    groups = enumerate(config.kv_cache_groups)
    index, group = next((i, group) for i, group in groups if attention_layer in group.layer_names)
    return CacheGroup(index, config.num_blocks, group.kv_cache_spec.block_size)


def blocks(engine: LLMEngine, engine_id: str, group: CacheGroup) -> list[int]:
    """The blocks of the cache that a request has, or had when it finished in the last step; V1 alone."""
    return runner(engine).requests[engine_id].block_ids[group.index]


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


def unlink_broadcast_memory() -> None:
    """Takes the names of the shared memory away by which rank 0 broadcasts; call it once an engine is built, when all
    ranks have opened that memory. A process that is killed would leave the names in /dev/shm."""
    from vllm.distributed import parallel_state

    for group in [reference() for reference in parallel_state._groups.values()]:
        broadcaster = None if group is None else group.mq_broadcaster
        if broadcaster is not None and broadcaster.buffer is not None and broadcaster.buffer.is_creator:
            broadcaster.buffer.shared_memory.unlink()
            broadcaster.buffer.is_creator = False  # it would unlink once more


def shut_down(engine: LLMEngine) -> None:
    """Frees the engine's memory and this process's process groups."""
    engine.engine_core.shutdown()

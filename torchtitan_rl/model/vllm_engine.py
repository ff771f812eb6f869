"""A vLLM engine on a thread of its own, driven by commands.

One thread owns the engine: it drains commands, steps while there is work, sleeps when idle. With tensor
parallelism every rank runs such a thread; rank 0 decides what the next iteration does and tells the
others, because ranks that stepped different schedules would wait for each other forever. Whatever kills
the thread is raised from every call that waits on it.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as EngineSamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind

from torchtitan_rl import platform
from torchtitan_rl.config.actors import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.model import vllm_internals, vllm_model
from torchtitan_rl.model.spec import build_spec
from torchtitan_rl.types import Completion, Request, SamplingParams

__all__ = ["Engine", "engine_args"]

logger = logging.getLogger(__name__)

_CLOSE_S = 60.0
# What vLLM's default (compiled pieces, and graphs) comes down to for a class without `@support_torch_compile`, in its
# second model runner; said outright, so that the first does the same and neither tries to compile.
_CAPTURE_DECODING = {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"}
_IDLE_WAIT_S = 0.5  # an idle rank 0 speaks to its followers this often, well within the collective's time limit


@dataclass(slots=True)
class _InFlight:
    engine_id: str
    version_starts: list[tuple[int, int]]
    """(number of tokens already sampled, policy version from there on)."""
    future: Future | None
    """None on ranks that only follow."""
    top_k: int = 0
    """Of a request that scores."""


@dataclass(slots=True)
class _Command:
    """What every rank does before its next iteration. Data only: it is sent to the other ranks."""

    add: list[tuple[str, Request]] = field(default_factory=list)
    load: int | None = None
    sleep: bool = False
    wake: str | None = None


class Engine:
    """`submit` requests and `load` weights from any thread; both return futures (on the leading rank)."""

    def __init__(self, config: GeneratorConfig, model_dir: str, seed: int, rank: int, *, sleeps: bool = False):
        self._config, self._model_dir, self._seed, self._sleeps = config, model_dir, seed, sleeps
        self._spec = build_spec(ModelConfig(assets=model_dir))
        self._held = self._whole_parameters()
        self._leads = rank == 0
        self._commands: queue.SimpleQueue[tuple[_Command, list[Future]]] = queue.SimpleQueue()
        self._in_flight: dict[str, _InFlight] = {}
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._asleep: set[str] = set()
        self._current: list[Future] = []
        """Futures of the command being executed."""
        self._counter = 0
        self._failure: BaseException | None = None
        self.policy_version, self._num_loads = -1, 0
        self.ready: Future = Future()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # Called from the actor.

    def submit(self, requests: list[Request]) -> list[Future]:
        """Admits requests together, in order, before the next iteration. Each future gives a Completion, or when
        scoring a list of log-probabilities, one per token but the first, and with `top_k` a pair of tensors with a row
        for each: tokens, and their log-probabilities."""
        command, futures = _Command(), []
        for request in requests:
            self._counter += 1
            command.add.append((str(self._counter), request))
            futures.append(Future())
        self._send(command, futures)
        return futures

    def stage(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """Hands this rank the tensors of a version, to be loaded when rank 0 says so."""
        self._staged[version] = tensors

    def load(self, version: int) -> Future:
        """Copies a staged version into the model between two iterations. Every rank must have staged it."""
        future: Future = Future()
        self._send(_Command(load=version), [future])
        return future

    def sleep(self) -> Future:
        """Takes weights and KV cache off the device, for a trainer that shares it. Raises RuntimeError when it is
        busy."""
        future: Future = Future()
        self._send(_Command(sleep=True), [future])
        return future

    def wake(self, part: str) -> Future:
        """Brings back `"weights"` or `"kv_cache"`; the cache comes back empty."""
        future: Future = Future()
        self._send(_Command(wake=part), [future])
        return future

    def close(self) -> None:
        """Ends the thread and frees what the engine held, the process groups of this process included. Calls that wait
        are failed. Raises RuntimeError when the thread does not end."""
        self._closing = True
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the engine did not end within {_CLOSE_S:g} s; end this process")

    def held(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every whole parameter the model takes, by torchtitan's name."""
        return self._held

    def from_hf(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Hugging Face's names to torchtitan's."""
        return self._spec.state_dict_adapter(self._spec.model, None).from_hf(tensors)

    def _send(self, command: _Command, futures: list[Future]) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine has stopped: {self._failure!r}")
        self._commands.put((command, futures))
        if self._failure is not None:  # it died in between and may not have seen this command
            self._fail_waiting()

    # On the engine's thread.

    def _run(self) -> None:
        try:
            self._engine = self._build()
            self.ready.set_result(None)
            while not self._closing:
                self._iterate()
            self._failure = RuntimeError("it was closed")
            self._fail_waiting()
            vllm_internals.shut_down(self._engine)
        except BaseException as error:  # whatever it was, nobody may wait for this thread any more
            logger.exception("the engine thread failed")
            self._failure = error
            if not self.ready.done():
                self.ready.set_exception(error)
            elif not self._leads:  # rank 0 waits for this rank in a collective; only a dead process is noticed
                logging.shutdown()
                os._exit(1)
            self._fail_waiting()

    def _fail_waiting(self) -> None:
        waiting = [request.future for request in self._in_flight.values()] + self._current
        while not self._commands.empty():
            waiting += self._commands.get_nowait()[1]
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(RuntimeError(f"the engine has stopped: {self._failure!r}"))

    def _build(self) -> LLMEngine:
        vllm_model.register()
        args = engine_args(self._config, self._model_dir, self._seed, sleeps=self._sleeps)
        with vllm_internals.private_shared_memory(), vllm_internals.chosen_model_runner(self._config.model_runner):
            engine = LLMEngine.from_engine_args(args)
        self.model: Any = vllm_internals.model(engine)
        self.model_runner = vllm_internals.model_runner(engine)
        return engine

    def _whole_parameters(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        with torch.device("meta"):
            whole = self._spec.model.build()
        buffers = {name for name, _ in whole.named_buffers()}
        dtype = getattr(torch, self._config.dtype)
        return {
            name: (tuple(tensor.shape), tensor.dtype if name in buffers else dtype)
            for name, tensor in whole.state_dict().items()
        }

    def _iterate(self) -> None:
        """One round: take a command, then one engine step."""
        command, futures = self._next()
        self._current = futures
        if command.load is not None:
            self._load(command.load)
            for future in futures:
                future.set_result(command.load)
        if command.sleep or command.wake:
            error = self._sleep() if command.sleep else self._wake(command.wake)
            for future in futures:
                future.set_exception(RuntimeError(error)) if error else future.set_result(None)
        for index, (request_id, request) in enumerate(command.add):
            self._add(request_id, request, futures[index] if self._leads else None)
        self._current = []
        if self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.finished:
                    self._finish(output)

    def _next(self) -> tuple[_Command, list[Future]]:
        command, futures = _Command(), []
        if self._leads:
            try:
                if self._engine.has_unfinished_requests():
                    command, futures = self._commands.get_nowait()
                else:
                    command, futures = self._commands.get(timeout=_IDLE_WAIT_S)
            except queue.Empty:
                pass
        if self._config.tensor_parallel_degree > 1:
            command = vllm_internals.from_leader(command)
        return command, futures

    def _sleep(self) -> str:
        """Why it cannot, or nothing. Every rank comes to the same answer."""
        if self._engine.has_unfinished_requests():
            return f"sleep: {len(self._in_flight)} requests are in flight; wait for them first"
        if not self._asleep:
            self._engine.reset_prefix_cache()
            if platform.can_sleep():
                self._engine.sleep(level=1)
        self._asleep = {"weights", "kv_cache"}
        return ""

    def _wake(self, part: str) -> str:
        if part == "kv_cache" and "weights" in self._asleep:
            return "wake=kv_cache: the weights are still asleep; wake them first"
        if part in self._asleep and platform.can_sleep():
            self._engine.wake_up(tags=[part])
        self._asleep.discard(part)
        return ""

    def _load(self, version: int) -> None:
        assert "weights" not in self._asleep, "dispatch wakes the weights before a pull"
        tensors = self._staged.pop(version)
        if self._config.model_impl == "vllm":  # its own Qwen3 knows Hugging Face's names and repacks its weights
            head = tensors["lm_head.weight"]
            tensors = self._spec.state_dict_adapter(self._spec.model, None).to_hf(tensors) | {"lm_head.weight": head}
            vllm_internals.reload_weights(self._engine, tensors)
        else:
            with torch.inference_mode():
                self.model.load_weights(tensors.items())
        self.policy_version, self._num_loads = version, self._num_loads + 1
        for request in self._in_flight.values():
            request.version_starts.append((vllm_internals.num_sampled(self._engine, request.engine_id), version))
        # Requests carry the number of loads as cache salt, so old blocks are never matched; this frees them.
        if not self._engine.has_unfinished_requests() and not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset after a pull")

    def _add(self, request_id: str, request: Request, future: Future | None) -> None:
        if self._asleep:
            if future is not None:
                future.set_exception(
                    RuntimeError(
                        f"asleep={sorted(self._asleep)}: the generator gave its device to a trainer; sample through a "
                        "SamplingClient, which wakes it"
                    )
                )
            return
        prompt = {"prompt_token_ids": request.tokens, "cache_salt": str(self._num_loads)}
        try:
            engine_id = self._engine.add_request(request_id, prompt, _engine_params(request))
        except (ValueError, TypeError, VLLMClientError) as error:  # the request is at fault, not the engine
            if future is not None:
                future.set_exception(ValueError(f"prompt of {len(request.tokens)} tokens: {error}"))
            return
        self._in_flight[request_id] = _InFlight(engine_id, [(0, self.policy_version)], future, request.top_k)

    def _finish(self, output) -> None:
        request = self._in_flight.pop(output.request_id)
        if request.future is None:
            return
        if output.prompt_logprobs is not None:
            tokens, entries = output.prompt_token_ids[1:], output.prompt_logprobs[1:]
            if request.top_k:
                rows = [_likeliest(entry, request.top_k) for entry in entries]
                request.future.set_result(
                    (
                        torch.tensor([[token for token, _ in row] for row in rows]),
                        torch.tensor([[logprob for _, logprob in row] for row in rows]),
                    )
                )
            else:
                request.future.set_result([entry[token].logprob for token, entry in zip(tokens, entries, strict=True)])
            return
        sampled = output.outputs[0]
        tokens = list(sampled.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(tokens, sampled.logprobs, strict=True)]
        versions: list[int] = []
        for (_, version), (end, _) in zip(request.version_starts, [*request.version_starts[1:], (len(tokens), 0)]):
            versions += [version] * (end - len(versions))
        request.future.set_result(
            Completion(tokens=tokens, logprobs=logprobs, policy_versions=versions, finish_reason=sampled.finish_reason)
        )


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


def _likeliest(entry: dict, top_k: int) -> list[tuple[int, float]]:
    """The best of one position, of equals the lower id first. vLLM adds the prompt's own token, with its rank, where it
    is not among them."""
    best = [(token, scored.logprob) for token, scored in entry.items() if scored.rank <= top_k]
    return sorted(best, key=lambda pair: (-pair[1], pair[0]))


def _engine_params(request: Request) -> EngineSamplingParams:
    """vLLM's own; a request without parameters scores its prompt. Raises vLLM's error for values it refuses."""
    params: SamplingParams | None = request.params
    if params is None:
        return EngineSamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=request.top_k,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    return EngineSamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        stop=params.stop,
        ignore_eos=params.ignore_eos,
        logprobs=0,
        detokenize=bool(params.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

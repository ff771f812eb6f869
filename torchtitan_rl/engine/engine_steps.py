"""What a vLLM engine does in a step of a run: takes requests, samples, loads weights.

Commands travel from the caller's thread to the engine's thread. With tensor parallelism rank 0 broadcasts the next
command, because ranks that stepped different schedules would wait for each other forever.
"""

from __future__ import annotations

import queue
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

import torch
from torchtitan.protocols.model_spec import ModelSpec
from vllm import LLMEngine
from vllm import SamplingParams as EngineSamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.engine import vllm_internals
from torchtitan_rl.engine.plan import whole_parameters
from torchtitan_rl.engine.prompt_scores import has_nan, scores, scoring_params
from torchtitan_rl.engine.structures import structured_outputs
from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import NEUTRAL, Completion, Request, SamplingParams

__all__ = ["EngineSteps", "Command", "engine_params", "completion"]

_SAME = ("max_tokens", "temperature", "seed", "stop_token_ids", "stop", "ignore_eos", *NEUTRAL)
"""The fields that vLLM's sampling parameters have under the same names."""
_IDLE_WAIT_S = 0.5  # an idle rank 0 broadcasts this often, well within the collective's time limit


@dataclass(slots=True)
class _InFlight:
    engine_id: str
    version_starts: list[tuple[int, int]]
    """(number of tokens already sampled, policy version from there on)."""
    future: Future | None
    """The caller's future; None on ranks other than 0."""
    top_k: int = 0  # `Request.top_k` of a scoring request


@dataclass(slots=True)
class Command:
    """An instruction that every rank executes before the next engine step. Data only: rank 0 broadcasts commands."""

    kind: Literal["add", "load", "sleep", "wake"] = "add"
    argument: Any = field(default_factory=list)
    """`add`: a list of (request id, request). `load`: a policy version. `wake`: a part's name. `sleep`: unused."""
    more: bool = False  # whether another command is executed before the engine steps


class EngineSteps(ABC):
    """`submit` requests and `load` weights from any thread of rank 0's process; both return futures. `Engine` adds the
    thread."""

    _engine: LLMEngine
    model: Any

    def __init__(self, config: GeneratorConfig, spec: ModelSpec, *, leads: bool) -> None:
        """`leads`: this rank is rank 0, which gets the requests."""
        self._config, self._spec, self._leads = config, spec, leads
        self.held = whole_parameters(spec, config.dtype)
        """Shape and dtype of every unsharded parameter that the model takes, by torchtitan's name."""
        self._commands: queue.SimpleQueue[tuple[Command, list[Future]]] = queue.SimpleQueue()
        self._probes: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._in_flight: dict[str, _InFlight] = {}
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._asleep: set[str] = set()
        self._spoiled = False
        """Whether a request had a NaN since the prefix cache was emptied."""
        self._current: list[Future] = []
        """Futures of the command being executed."""
        self._do: dict[str, Callable[[Any, list[Future]], None]] = {"add": self._add_all, "load": self._load_staged}
        """By the kind of a command: what executes it."""
        self._counter = 0
        self._failure: BaseException | None = None
        self.policy_version, self._num_loads = -1, 0

    # Methods that the actor calls.

    def submit(self, requests: list[Request]) -> list[Future]:
        """Admits requests together, in order, before the next engine step; returns a future per request.

        The future of a sampling request gives a Completion. The future of a scoring request gives one log-probability
        per token but the first; with `top_k`, a pair of tensors (T - 1, top_k): tokens and log-probabilities."""
        command, futures = Command(), []
        for request in requests:
            self._counter += 1
            command.argument.append((str(self._counter), request))
            futures.append(Future())
        self._send(command, futures)
        return futures

    def stage(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps the tensors of a version on this rank until rank 0 commands the load."""
        self._staged[version] = tensors

    def load(self, version: int) -> Future:
        """Copies a version that every rank has staged into the model between two steps; gives the seconds it took."""
        return self._ask(Command("load", version))

    def _ask(self, command: Command) -> Future:
        future: Future = Future()
        self._send(command, [future])
        return future

    def _send(self, command: Command, futures: list[Future]) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine has stopped: {self._failure!r}")
        self._commands.put((command, futures))
        if self._failure is not None:  # the thread died after the first check and may have missed this command
            self._fail_waiting()

    @abstractmethod
    def _fail_waiting(self) -> None:
        """Raises from every waiting call why the thread has ended."""

    # Methods that run on the engine's thread.

    def _iterate(self) -> None:
        """Executes the commands that wait, then takes one engine step if there is work."""
        more = True
        while more:
            idle = not self._engine.has_unfinished_requests()
            with span("wait for a request") if idle else nullcontext():
                command, self._current = self._next()
            self._do[command.kind](command.argument, self._current)
            self._current, more = [], command.more
        self._step()

    def _step(self) -> None:
        """Gives a sign of life to who asked for one, and takes one engine step if there is work."""
        while not self._probes.empty():
            self._probes.get_nowait().set_result(None)
        if self._engine.has_unfinished_requests():
            with span("engine step"):
                for output in self._engine.step():
                    if output.finished:
                        self._finish(output)
        if self._spoiled and not self._engine.has_unfinished_requests():
            self._spoiled = not self._engine.reset_prefix_cache()  # no later request reads what a NaN was computed from

    def _next(self) -> tuple[Command, list[Future]]:
        command, futures = Command(), []
        if self._leads:
            wait_s = 0.0 if self._engine.has_unfinished_requests() else _IDLE_WAIT_S
            with suppress(queue.Empty):
                command, futures = self._commands.get(timeout=wait_s)
                command.more = not self._commands.empty()
        if self._config.tensor_parallel_degree > 1:
            command = vllm_internals.from_leader(command)
        return command, futures

    def _load_staged(self, version: int, futures: list[Future]) -> None:
        with span("load weights", version=version):
            self._copy_staged(version, futures)

    def _copy_staged(self, version: int, futures: list[Future]) -> None:
        assert "weights" not in self._asleep, "dispatch wakes the weights before a pull"
        tensors, began = self._staged.pop(version), time.perf_counter()
        flying = self._engine.has_unfinished_requests()
        if self._config.model_impl == "vllm":
            vllm_internals.reload_weights(self._engine, self._spec, tensors)
        else:
            with torch.inference_mode():
                self.model.load_weights(tensors.items())
        self.policy_version, self._num_loads = version, self._num_loads + 1
        for request in self._in_flight.values():
            request.version_starts.append((vllm_internals.num_sampled(self._engine, request.engine_id), version))
        # Requests carry the number of loads as cache salt, so old blocks never match; the reset frees old blocks.
        if not flying and not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset after a pull")
        if self._config.verify_loaded and self._config.model_impl != "vllm":
            if flying:
                return self._check_beside(version, tensors, futures, time.perf_counter() - began)
            self.model.check_holds(tensors.items(), version)
        for future in futures:
            future.set_result(time.perf_counter() - began)

    @abstractmethod
    def _check_beside(self, version: int, tensors: dict, futures: list[Future], stall_s: float) -> None:
        """Gives `stall_s` to the futures once the model was found to hold the tensors, while the engine goes on."""

    def _add_all(self, requests: list[tuple[str, Request]], futures: list[Future]) -> None:
        if not requests:  # the command of an iteration without a command
            return
        with span("add requests"):
            for (request_id, request), future in zip_longest(requests, futures):  # ranks other than 0 have no futures
                self._add(request_id, request, future)

    def _add(self, request_id: str, request: Request, future: Future | None) -> None:
        prompt = tokens_input(request.tokens, cache_salt=str(self._num_loads))
        try:
            engine_id = self._engine.add_request(request_id, prompt, engine_params(request))
        except (ValueError, TypeError, VLLMClientError) as error:  # the request is at fault, not the engine
            return _refuse(future, request, error)
        self._in_flight[request_id] = _InFlight(engine_id, [(0, self.policy_version)], future, request.top_k)

    def _finish(self, output) -> None:
        request = self._in_flight.pop(output.request_id)
        undefined = has_nan(output)
        self._spoiled = self._spoiled or undefined  # on every rank: their caches stay alike
        if request.future is None:
            return
        if undefined:
            version = request.version_starts[-1][1]
            return request.future.set_exception(
                ValueError(
                    f"policy_version={version}: its weights give NaN as a log-probability after a prompt of "
                    f"{len(output.prompt_token_ids)} tokens; sample from another version"
                )
            )
        if output.outputs and output.outputs[0].finish_reason == "error":  # the grammar of a structure, and no other
            return request.future.set_exception(
                ValueError("structure: cannot be made a grammar; the generator's log says why, ask for a simpler one")
            )
        scored = output.prompt_logprobs is not None
        answer = scores(output, request) if scored else completion(output, request.version_starts)
        request.future.set_result(answer)


def _refuse(future: Future | None, request: Request, error: Exception) -> None:
    if future is not None:
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())  # xgrammar's own words are the cause
        future.set_exception(ValueError(f"prompt of {len(request.tokens)} tokens: {reason}"))


def engine_params(request: Request) -> EngineSamplingParams:
    """vLLM's sampling parameters; a request without parameters scores the prompt. Raises vLLM's error for values that
    vLLM refuses."""
    params: SamplingParams | None = request.params
    if params is None:
        return scoring_params(request)
    same = {name: getattr(params, name) for name in _SAME}
    final = RequestOutputKind.FINAL_ONLY
    structure = structured_outputs(params.structure)
    return EngineSamplingParams(
        **same, logprobs=0, detokenize=bool(params.stop), output_kind=final, structured_outputs=structure
    )


def completion(output: Any, version_starts: list[tuple[int, int]]) -> Completion:
    """The completion of a finished `RequestOutput`. `version_starts`: (number of tokens already sampled, policy version
    from there on), the first at 0."""
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    logprobs = [entry[token].logprob for token, entry in zip(tokens, sampled.logprobs, strict=True)]
    versions: list[int] = []
    for (_, version), (end, _) in zip(version_starts, [*version_starts[1:], (len(tokens), 0)]):
        versions += [version] * (end - len(versions))
    return Completion(tokens=tokens, logprobs=logprobs, policy_versions=versions, finish_reason=sampled.finish_reason)

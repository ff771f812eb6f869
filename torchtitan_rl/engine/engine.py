"""A vLLM engine on a thread of its own, driven by commands.

One thread owns the engine: the thread drains commands, steps while there is work, and sleeps when idle. With tensor
parallelism every rank runs such a thread. Rank 0 broadcasts the next command, because ranks that stepped different
schedules would wait for each other forever. An error that ends the thread is raised from every waiting call.
"""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from vllm import LLMEngine
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.model_executor.models.registry import ModelRegistry

from torchtitan_rl import adapters, platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.engine import noise, vllm_internals, vllm_model
from torchtitan_rl.engine.arguments import engine_args
from torchtitan_rl.engine.commands import (
    AddRequests,
    CancelRequests,
    Command,
    JoinCompany,
    Load,
    LoadAdapters,
    Sleep,
    Wake,
)
from torchtitan_rl.engine.engine_requests import completion, engine_params, has_nan, scores
from torchtitan_rl.engine.followed_schedule import FollowedSchedule, companion_number
from torchtitan_rl.engine.layer_adapters import NO_SLOT
from torchtitan_rl.engine.plan import whole_adapters, whole_parameters
from torchtitan_rl.model.decoding import schedules_ahead
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.model.spec import build_spec
from torchtitan_rl.record.schedule import (
    Companion,
    ScheduleFile,
    Schedules,
    UnderWay,
    company,
    digests,
    followed_entries,
)
from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import WITHOUT_ADAPTERS, Request, SamplingParams

__all__ = ["Engine"]

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5  # an idle rank 0 broadcasts this often, well within the collective's time limit
_CLOSE_S = 60.0
_COMPANY_SALT = "company"
"""Cache salt of companions. No other request has it, so none reads what was computed from their placeholder tokens."""


@dataclass(slots=True)
class _InFlight:
    engine_id: str
    version_starts: list[tuple[int, int]]
    """(number of tokens already sampled, policy version from there on)."""
    future: Future | None
    """The caller's future; None on ranks other than 0, and of a companion."""
    top_k: int = 0  # `Request.top_k` of a scoring request
    number: int = 0
    """`Request.number`; negative: a companion, which stands for a recorded request and answers nobody."""
    params: SamplingParams | None = None


@dataclass(slots=True)
class _Resident:
    """Adapters that the model holds."""

    slot: int
    acts: bool
    """Whether they change anything: a new model's do not, as its B is 0."""
    salt: str
    """Cache salt of the requests with these adapters. Two loads never share one."""


class Engine:
    """An engine and its thread. The public methods may be called from any thread of the process: `submit`, `cancel`,
    `load`, `load_adapters`, `sleep`, `wake` and `probe` of rank 0 alone. They return futures, which the engine's thread
    answers.
    """

    model: Any
    """This rank's model, and `model_runner`, vLLM's `"v1"` or `"v2"`: there once `ready` is done."""
    model_runner: str

    _engine: LLMEngine

    def __init__(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        seed: int,
        rank: int,
        *,
        sleeps: bool = False,
        role: str = "generator-0",
        schedules: Schedules | None = None,
    ) -> None:
        """`model.assets` is a directory with a config.json and the tokenizer. `sleeps`: the engine shares its device
        with a trainer. `schedules`: where rank 0 records what it executes when, and what it follows; None: nowhere,
        and nothing."""
        self._config, self._model_config, self._seed, self._sleeps = config, model, seed, sleeps
        self._spec = build_spec(model)
        shape = resolve_shape(model)
        self._schedules_ahead, self._ties_embeddings = schedules_ahead(config, shape), shape.tie_embeddings
        self._leads = rank == 0
        """Whether this rank is rank 0, which gets the requests."""
        self.parameter_specs = whole_parameters(self._spec, config.dtype)
        """Shape and dtype of every unsharded parameter that the model takes, by torchtitan's name."""
        self.adapter_specs = (
            {} if config.adapters is None else whole_adapters(self._spec, config.adapters, config.dtype)
        )
        """Shape and dtype of each adapter tensor of one slot; empty: the engine has no slots."""
        self.base = ""
        """Name of the base that the adapters in slots belong to; empty: no base is loaded."""
        self.policy_version = -1
        self.ready: Future = Future()
        """Done once the engine is built, or the exception that building it has raised."""

        # Written by callers, read by the engine's thread.
        self._commands: queue.SimpleQueue[tuple[Command, list[Future]]] = queue.SimpleQueue()
        self._probes: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._staged_bases: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
        """Name and tensors of the base that a version's adapters need and the model did not hold when they came."""
        self._digests: dict[int, str] = {}
        """Of the staged versions, where a schedule is recorded."""
        self._request_ids = itertools.count(1)
        self._closing = False

        # Written by the engine's thread.
        self._in_flight: dict[str, _InFlight] = {}
        self._current: list[Future] = []
        """Futures of the command being executed."""
        self._num_loads = 0
        self._adapters: dict[int, _Resident] = {}
        """By version, the adapters that the model holds."""
        self._iteration = 0
        """The engine steps so far."""
        self._recording: ScheduleFile | None = None
        self._followed_schedule: FollowedSchedule | None = None
        self._patience_s: float | None = None
        self._awaited_since: float | None = None
        """Since when the engine stands still for a command of the followed schedule, by `time.monotonic`."""
        if schedules is not None and self._leads:
            self._recording = ScheduleFile(schedules.directory, role)
            if file := schedules.followed.get(role):
                entries = followed_entries(Path(file), schedules)
                self._followed_schedule = FollowedSchedule(
                    entries, [] if schedules.after_load is None else company(entries)
                )
            self._patience_s = schedules.patience_s
        self._asleep: set[str] = set()
        """Of `"weights"` and `"kv_cache"`, what the device does not have."""
        self._cache_has_nan = False
        """Whether a request had a NaN since the prefix cache was emptied."""
        self._halted = False
        """Whether the last load failed: the model holds no whole version, and requests wait for a load."""
        self._check: threading.Thread | None = None
        """Compares the loaded weights with those that were sent, beside requests."""
        self._cache: vllm_internals.CacheGroup | None = None
        """The slots by which experts of tokens are recorded; None: they are not."""
        self._failure: BaseException | None = None
        """Why the thread has ended."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins to build the engine; `ready` says when it is built."""
        self._thread.start()

    # Methods that the actor calls.

    def submit(self, requests: list[Request]) -> list[Future]:
        """Admits requests together, in order, before the next engine step; returns a future per request.

        The future of a sampling request gives a Completion. The future of a scoring request gives one log-probability
        per token but the first; with `top_k`, a pair of tensors (T - 1, top_k): tokens and log-probabilities."""
        command, futures = AddRequests(), []
        for request in requests:
            command.requests.append((str(next(self._request_ids)), request))
            futures.append(_future())
        self._send(command, futures)
        return futures

    def cancel(self, numbers: list[int]) -> Future:
        """Takes the requests with these `Request.number` out of the engine, where they are in it: nobody waits for
        their answers, which are None."""
        return self._send_one(CancelRequests(numbers))

    def stage(self, version: int, tensors: dict[str, torch.Tensor]) -> None:
        """Keeps the tensors of a version on this rank until rank 0 commands the load."""
        if self._recording is not None:
            self._digests[version] = digests(tensors)
        self._staged[version] = tensors

    def stage_adapters(
        self, version: int, tensors: dict[str, torch.Tensor], base: tuple[str, dict[str, torch.Tensor]] | None
    ) -> None:
        """Keeps the adapters of a version on this rank until rank 0 commands the load, and name and tensors of the base
        that they need; None: the model holds it."""
        if self._recording is not None:
            self._digests[version] = digests(tensors)
        self._staged[version] = tensors
        if base is not None:
            self._staged_bases[version] = base

    def load(self, version: int) -> Future:
        """Copies a version that every rank has staged into the model between two steps. Gives the seconds it took, or a
        ValueError that says why the version cannot be loaded. The engine stands still then, until it loads another."""
        return self._send_one(Load(version))

    def load_adapters(self, version: int, slot: int) -> Future:
        """Copies adapters that every rank has staged into a slot, between two steps, in place of those in it, which no
        request in the engine may need. Gives the seconds it took, or a ValueError that says why they cannot be loaded:
        the slot is empty then."""
        return self._send_one(LoadAdapters(version, slot))

    def sleep(self) -> Future:
        """Frees weights and KV cache on a device shared with a trainer. Raises RuntimeError while requests run."""
        return self._send_one(Sleep())

    def wake(self, part: str) -> Future:
        """Brings back `"weights"` or `"kv_cache"`; the cache comes back empty."""
        return self._send_one(Wake(part))

    def probe(self) -> Future:
        """Done once the engine's thread has answered, between two iterations. Not a command: other ranks do not see
        it."""
        future = _future()
        self._probes.put(future)
        if self._failure is not None:
            raise RuntimeError(f"the engine has stopped: {self._failure!r}")
        return future

    def close(self) -> None:
        """Ends the thread and frees the engine's memory and this process's process groups. Waiting calls fail.

        Raises RuntimeError when the thread does not end."""
        self._closing = True
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            raise RuntimeError(f"the engine did not end within {_CLOSE_S:g} s; end this process")

    def from_hf(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Renames tensors from Hugging Face's names to torchtitan's. A tied head is the embedding, whatever head the
        files have: trainers do not read that one either."""
        if self._ties_embeddings:
            tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
        return self._spec.state_dict_adapter(self._spec.model, None).from_hf(tensors)

    def unequal_tie(self, tensors: dict[str, torch.Tensor]) -> str:
        """The name of a tensor that the model shares with another name, where the two differ; empty: there is none."""
        return "" if self._config.model_impl == "vllm" else self.model.unequal_tie(tensors)

    def _send_one(self, command: Command) -> Future:
        future = _future()
        self._send(command, [future])
        return future

    def _send(self, command: Command, futures: list[Future]) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine has stopped: {self._failure!r}")
        self._commands.put((command, futures))
        if self._failure is not None:  # the thread died after the first check and may have missed this command
            self._fail_waiting()

    # The engine's thread: its life.

    def _run(self) -> None:
        try:
            self._engine = self._build()
            self.ready.set_result(None)
            while not self._closing:
                self._iterate()
            self._failure = RuntimeError("it was closed")
            self._fail_waiting()
            vllm_internals.shut_down(self._engine)
        except BaseException as error:  # any error at all: a caller would wait forever for a dead thread
            logger.exception("the engine thread failed")
            self._failure = error
            if not self.ready.done():
                self.ready.set_exception(error)
            elif not self._leads:  # rank 0 waits for this rank in a collective and notices only a dead process
                logging.shutdown()
                os._exit(1)
            self._fail_waiting()
            # The process of an engine alone may go on, and needs its memory. One with other ranks is ended with them.
            if hasattr(self, "_engine") and self._config.tensor_parallel_degree == 1:
                with suppress(Exception):  # a broken engine may not end in order, and why it broke is said above
                    vllm_internals.shut_down(self._engine)
        finally:
            if self._recording is not None:
                self._recording.close()

    def _build(self) -> LLMEngine:
        model_class = vllm_model.model_class(resolve_shape(self._model_config))
        ModelRegistry.register_model(model_class.__name__, model_class)
        args = engine_args(self._config, self._model_config, self._seed, sleeps=self._sleeps)
        with (
            adapters.private_shared_memory(),
            adapters.nameless_semaphores(),
            adapters.zeroed_blocks(),
            vllm_internals.chosen_model_runner("v1" if self._config.max_adapters else self._config.model_runner),
        ):
            engine = LLMEngine.from_engine_args(args)
        vllm_internals.unlink_broadcast_memory()
        self.model = vllm_internals.model(engine)
        self.model_runner = vllm_internals.model_runner(engine)
        if self.model_runner == "v1":
            if self._schedules_ahead:  # VLLM_USE_V2_MODEL_RUNNER=0 chooses it where the config leaves it open
                raise RuntimeError(
                    "generator.async_scheduling: the engine has vLLM's V1 model runner, which draws tokens by numbers "
                    "that are a step old then; use generator.async_scheduling=False, or the V2 runner "
                    "(generator.model_runner='v2', without VLLM_USE_V2_MODEL_RUNNER=0)"
                )
            noise.install(vllm_internals.runner(engine), self._seed)
        if self._config.max_adapters:
            self.model.adapter_batch.install(vllm_internals.runner(engine), self._config.max_num_seqs)
        if self._config.record_routing and self._leads:
            self._cache = self._record_routing(engine)
        return engine

    def _record_routing(self, engine: LLMEngine) -> vllm_internals.CacheGroup:
        """Begins to record the experts of tokens, by their slots in a group of the cache."""
        if self.model_runner != "v1":
            raise RuntimeError(
                f"generator.record_routing=True: the engine has vLLM's model runner {self.model_runner}, of which only "
                "v1 says where a request's tokens are; use generator.model_runner='v1'"
            )
        cache = vllm_internals.cache_group(engine, self.model.routing.attention_layer)
        device = next(self.model.parameters()).device
        self.model.routing.allocate(cache.num_blocks, cache.block_size, device)
        return cache

    def _fail_waiting(self) -> None:
        """Raises from every waiting call why the thread has ended."""
        waiting = [request.future for request in self._in_flight.values()] + self._current
        while not self._commands.empty():
            waiting += self._commands.get_nowait()[1]
        while not self._probes.empty():
            waiting.append(self._probes.get_nowait())
        if self._followed_schedule is not None:
            waiting += self._followed_schedule.futures()
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(RuntimeError(f"the engine has stopped: {self._failure!r}"))

    # The engine's thread: one iteration.

    def _iterate(self) -> None:
        """Executes the commands that wait, then takes one engine step if there is work."""
        while True:
            with nullcontext() if self._has_work() else span("wait for a request"):
                command, self._current = self._next()
            self._execute(command, self._current)
            self._current = []
            if not command.holds_step:
                break
        self._step()

    def _next(self) -> tuple[Command, list[Future]]:
        """The next command and, on rank 0, its futures. Without one: a command to add no request."""
        command: Command = AddRequests()
        futures: list[Future] = []
        if self._followed_schedule is not None and not self._followed_schedule.is_over:
            command, futures = self._next_followed(self._followed_schedule)
        elif self._leads:
            wait_s = 0.0 if self._has_work() else _IDLE_WAIT_S
            with suppress(queue.Empty):
                command, futures = self._commands.get(timeout=wait_s)
                command.holds_step = not self._commands.empty()
        if self._config.tensor_parallel_degree > 1:
            command = vllm_internals.from_leader(command)
        return command, futures

    def _next_followed(self, followed: FollowedSchedule) -> tuple[Command, list[Future]]:
        """The command that the followed schedule has next. Without one after a while: an empty command, before which no
        step is taken."""
        while not self._commands.empty():
            followed.receive(*self._commands.get_nowait())
        received = followed.next(self._iteration, len(self._in_flight), has_work=self._has_work())
        if received is not None:
            self._awaited_since = None
            return received
        self._answer_probes()
        now = time.monotonic()
        self._awaited_since = self._awaited_since or now
        if self._patience_s is not None and now - self._awaited_since > self._patience_s:
            waited = f"at iteration {self._iteration}, {followed.awaited()} have not come for {self._patience_s:g} s"
            return followed.part(waited)
        with suppress(queue.Empty):
            followed.receive(*self._commands.get(timeout=_IDLE_WAIT_S))
        return AddRequests(holds_step=not self._closing), []

    def _execute(self, command: Command, futures: list[Future]) -> None:
        match command:
            case AddRequests(requests):
                self._add_all(requests, futures)
            case CancelRequests(numbers):
                self._cancel(numbers, futures)
            case Load(version):
                self._update(version, futures)
            case LoadAdapters(version, slot):
                self._load_staged_adapters(version, slot, futures)
            case JoinCompany(companions):
                self._join_company(companions)
            case Sleep():
                self._sleep_now(futures)
            case Wake(part):
                self._wake_now(part, futures)
            case _:
                raise TypeError(f"command={command!r}: is none that an engine executes")

    def _step(self) -> None:
        """Answers health probes, and takes one engine step if there is work."""
        self._answer_probes()
        if self._has_work():
            with span("engine step"):
                self._finish_all(self._engine.step())
            self._iteration += 1
            if not self._engine.has_unfinished_requests():
                self._end_steps_in_flight()  # the last ones, which sample nothing and hold blocks of the cache
        if self._cache_has_nan and not self._engine.has_unfinished_requests():
            # No later request reads what a NaN was computed from.
            self._cache_has_nan = not self._engine.reset_prefix_cache()

    def _end_steps_in_flight(self) -> None:
        """Waits for the steps that the device still computes."""
        if self._schedules_ahead:
            self._finish_all(vllm_internals.finish_steps_in_flight(self._engine))

    def _finish_all(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.finished:
                self._finish(output)

    def _answer_probes(self) -> None:
        while not self._probes.empty():
            self._probes.get_nowait().set_result(None)

    def _has_work(self) -> bool:
        return self._engine.has_unfinished_requests() and not self._halted

    # The engine's thread: requests.

    def _add_all(self, requests: list[tuple[str, Request]], futures: list[Future]) -> None:
        if not requests:  # the command of an iteration without a command
            return None
        if self._asleep:
            error = (
                f"asleep={sorted(self._asleep)}: the generator gave its device to a trainer; sample through a "
                "SamplingClient, which wakes it"
            )
            return _answer(futures, error)
        if self._recording is not None:
            self._recording.admitted(self._iteration, len(self._in_flight), [request for _, request in requests])
        with span("add requests"):
            for (request_id, request), future in zip_longest(requests, futures):  # ranks other than 0 have no futures
                self._add(request_id, request, future)

    def _add(self, request_id: str, request: Request, future: Future | None) -> None:
        version, slot, salt = self.policy_version, NO_SLOT, str(self._num_loads)
        if request.adapter == WITHOUT_ADAPTERS:
            version, salt = WITHOUT_ADAPTERS, self.base  # it stays what it is, whatever adapters are loaded
        elif request.adapter is not None:
            version = request.adapter
            if (resident := self._adapters.get(version)) is None:  # dispatch loads them before: a replay has parted
                return _refuse(future, request, ValueError(f"policy_version={version}: its adapters are in no slot"))
            slot, salt = resident.slot if resident.acts else NO_SLOT, resident.salt
        prompt = tokens_input(request.tokens, cache_salt=salt)
        try:
            engine_id = self._engine.add_request(request_id, prompt, engine_params(request, slot))
        except (ValueError, TypeError, VLLMClientError) as error:  # the request is at fault, not the engine
            return _refuse(future, request, error)
        self._in_flight[request_id] = _InFlight(
            engine_id, [(0, version)], future, request.top_k, request.number, request.params
        )

    def _cancel(self, numbers: list[int], futures: list[Future]) -> None:
        numbers = [request.number for request in self._in_flight.values() if request.number in numbers]
        if numbers:
            if self._recording is not None:
                self._recording.cancelled(self._iteration, len(self._in_flight), numbers)
            self._end_steps_in_flight()  # which answer some of them, it may be
        for request_id, request in list(self._in_flight.items()):
            if request.number in numbers:
                del self._in_flight[request_id]
                self._engine.abort_request([request.engine_id], internal=True)
                if request.future is not None:
                    request.future.set_result(None)
        _answer(futures)

    def _finish(self, output: Any) -> None:
        """Answers the request of a finished `RequestOutput`."""
        request = self._in_flight.pop(output.request_id)
        if request.number < 0:
            return
        if self._recording is not None and len(request.version_starts) > 1:
            num_tokens = len(output.prompt_token_ids) + sum(len(sampled.token_ids) for sampled in output.outputs)
            self._recording.ended(request.number, num_tokens, output.num_cached_tokens or 0)
        undefined = has_nan(output)
        self._cache_has_nan = self._cache_has_nan or undefined  # on every rank: their caches stay alike
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
        if output.prompt_logprobs is not None:
            return request.future.set_result(scores(output, request))
        sampled = completion(output, request.version_starts)
        if self._cache is not None:
            blocks = vllm_internals.blocks(self._engine, request.engine_id, self._cache)
            num_tokens = len(output.prompt_token_ids) + len(sampled.tokens) - 1
            sampled.routed_experts = self.model.routing.read(blocks, num_tokens)
        request.future.set_result(sampled)

    def _join_company(self, companions: list[Companion]) -> None:
        """Takes the engine to where the recorded one was at the load that its schedule is followed from. One step gives
        companions their rows of the batch, and frees the rows that were free; the next one is the first that counts."""
        expected: dict[str, int] = {}
        for waiting in (False, True):
            for i, companion in enumerate(companions):
                if companion.waits is waiting:
                    request_id = f"company-{i}"
                    self._add_companion(request_id, companion)
                    if companion.num_tokens:
                        expected[self._in_flight[request_id].engine_id] = companion.num_tokens
            if not waiting and self._in_flight:
                self._finish_all(self._engine.step())
        joined = {
            position.engine_id: position.num_tokens
            for position in vllm_internals.request_positions(self._engine)
            if position.num_tokens
        }
        if joined != expected:
            raise RuntimeError(
                f"replay: {len(expected)} requests were under way at the checkpoint, and the engine has no place for "
                "all of them; raise generator.kv_cache_gib in the config.json of a copy of the run"
            )

    def _add_companion(self, request_id: str, companion: Companion) -> None:
        """Adds a request in the place of a recorded one: where that had a row, as it was one token before."""
        num_sampled = 0 if companion.waits else 1  # the step that gives it its row samples one token
        num_tokens = max(1, companion.num_tokens - num_sampled)
        if not companion.num_tokens:  # its row is free at the next step
            max_tokens = 1
        elif companion.num_left is None:
            max_tokens = self._config.max_model_len - num_tokens
        else:
            max_tokens = companion.num_left + num_sampled
        request = Request(
            [0] * num_tokens,
            SamplingParams(max_tokens=max_tokens, temperature=companion.temperature, seed=0, ignore_eos=True),
            number=companion_number(companion),
        )
        params = engine_params(request)
        params.skip_reading_prefix_cache = True
        prompt = tokens_input(request.tokens, cache_salt=_COMPANY_SALT)
        engine_id = self._engine.add_request(request_id, prompt, params)
        vllm_internals.begin_at(self._engine, engine_id, max(0, companion.num_computed - num_sampled))
        starts = [(0, self.policy_version)]
        self._in_flight[request_id] = _InFlight(engine_id, starts, None, number=request.number, params=request.params)

    # The engine's thread: new weights.

    def _update(self, version: int, futures: list[Future]) -> None:
        """Loads a version. By the config's `on_update`, requests in flight keep their attention cache, end first, or
        have the cache computed again."""
        while self._config.on_update == "wait" and self._has_work():
            self._step()
        self._end_steps_in_flight()  # the version of their tokens is the one before
        with span("load weights", version=version):
            self._load_staged(version, futures)
        if self._config.on_update == "recompute":
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def _load_staged(self, version: int, futures: list[Future]) -> None:
        assert "weights" not in self._asleep, "dispatch wakes the weights before a pull"
        self._end_check()
        tensors, began = self._staged.pop(version), time.perf_counter()
        has_requests = self._engine.has_unfinished_requests()
        refusal = self._copy(version, tensors)
        if self._config.tensor_parallel_degree > 1:  # a version that fails on one rank halts all of them
            refusal = next(filter(None, vllm_internals.from_all(refusal)), "")
        self._halted = bool(refusal)
        if refusal:
            for future in futures:
                future.set_result(ValueError(refusal))
            return
        if self._recording is not None:
            self._recording.loaded(
                self._iteration,
                len(self._in_flight),
                version,
                self._digests.pop(version),
                sorted(tensors),
                self._under_way() if has_requests else [],
            )
        self.policy_version, self._num_loads = version, self._num_loads + 1
        for request in self._in_flight.values():
            request.version_starts.append((vllm_internals.num_sampled(self._engine, request.engine_id), version))
        # Requests carry the number of loads as cache salt, so old blocks never match; the reset frees old blocks.
        if not has_requests and not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset after a pull")
        if self._config.verify_loaded and self._config.model_impl != "vllm":
            if has_requests:
                return self._check_beside(version, tensors, futures, time.perf_counter() - began)
            self.model.check_holds(tensors.items(), version)
        for future in futures:
            future.set_result(time.perf_counter() - began)

    def _under_way(self) -> list[UnderWay]:
        """The requests that go on after a load."""
        by_engine_id = {request.engine_id: request for request in self._in_flight.values()}
        under_way = []
        for position in vllm_internals.request_positions(self._engine):
            request = by_engine_id.get(position.engine_id)
            params = None if request is None else request.params
            under_way.append(
                UnderWay(
                    number=0 if request is None else request.number,
                    num_tokens=position.num_tokens,
                    num_computed=-1 if position.preempted or request is None else position.num_computed,
                    temperature=None if params is None or params.altered() else params.temperature,
                )
            )
        return under_way

    def _load_staged_adapters(self, version: int, slot: int, futures: list[Future]) -> None:
        tensors, base, began = self._staged.pop(version), self._staged_bases.pop(version, None), time.perf_counter()
        recorded_digests = self._digests.pop(version, "")
        slot = self._own_slot(version) if slot >= self._config.max_adapters else slot
        self._adapters = {
            v: resident for v, resident in self._adapters.items() if v != version and resident.slot != slot
        }
        refusal, acts = "", False
        if base is not None and base[0] != self.base:
            refusal = self._copy_base(version, *base)
        if not refusal:
            with span("load adapters", version=version):
                refusal, acts = self._copy_adapters(version, slot, tensors)
        if self._config.tensor_parallel_degree > 1:
            answers = vllm_internals.from_all((refusal, acts))
            refusal, acts = next((why for why, _ in answers if why), ""), any(acts for _, acts in answers)
        if not refusal:
            if self._config.verify_loaded:  # raises: the engine is at fault, and not the version
                self.model.check_holds_adapters(slot, tensors)
            self._num_loads += 1
            self._adapters[version] = _Resident(slot, acts, f"adapters {self._num_loads}")
            if self._recording is not None:
                position = self._iteration, len(self._in_flight)
                self._recording.loaded(*position, version, recorded_digests, sorted(tensors), slot=slot)
        for future in futures:
            future.set_result(ValueError(refusal) if refusal else time.perf_counter() - began)

    def _own_slot(self, version: int) -> int:
        """A slot after the end of a replay's record: dispatch does not know which versions are in which slots. The
        version's own, an empty one, or of those that no request needs the one loaded first. Requests end until there is
        one."""
        if version in self._adapters:
            return self._adapters[version].slot
        while True:
            versions_in_flight = {request.version_starts[-1][1] for request in self._in_flight.values()}
            busy_slots = {
                resident.slot for version, resident in self._adapters.items() if version in versions_in_flight
            }
            taken = [resident.slot for resident in self._adapters.values()]  # in the order of their loads
            slots_by_age = [*(slot for slot in range(self._config.max_adapters) if slot not in taken), *taken]
            if (slot := next((slot for slot in slots_by_age if slot not in busy_slots), None)) is not None:
                return slot
            self._step()

    def _copy_base(self, version: int, name: str, tensors: dict[str, torch.Tensor]) -> str:
        """Copies the base of a version's adapters into the model. Returns why that failed; empty where it did not."""
        self.base, self._adapters = "", {}
        if refusal := self._copy(version, tensors):
            return refusal
        if self._config.verify_loaded:
            self.model.check_holds(tensors.items(), version)
        self.base = name
        return ""

    def _copy_adapters(self, version: int, slot: int, tensors: dict[str, torch.Tensor]) -> tuple[str, bool]:
        """Copies adapters into a slot. Returns why that failed, empty where it did not, and whether they act."""
        try:
            return "", self.model.load_adapters(slot, tensors)
        except Exception as error:
            logger.exception("the adapters of version %s were not loaded", version)
            return f"policy_version={version}: the engine cannot load its adapters ({error}); use another", False

    def _copy(self, version: int, tensors: dict[str, torch.Tensor]) -> str:
        """Copies a version into the model. Returns why that failed; empty where it did not."""
        try:
            if self._config.model_impl == "vllm":
                vllm_internals.reload_weights(self._engine, self._spec, tensors)
            else:
                with torch.inference_mode():
                    self.model.load_weights(tensors.items())
        except Exception as error:
            logger.exception("version %s was not loaded", version)
            return f"policy_version={version}: the engine cannot load it ({type(error).__name__}: {error}); use another"
        return ""

    def _check_beside(
        self, version: int, tensors: dict[str, torch.Tensor], futures: list[Future], stall_s: float
    ) -> None:
        """Compares the model with the tensors on a thread, while the engine goes on, and then answers `stall_s`."""

        def check() -> None:
            try:
                self.model.check_holds(tensors.items(), version)
            except Exception as error:
                logger.exception("the check of the loaded weights failed")
                if not self._leads:  # as in `_run`
                    logging.shutdown()
                    os._exit(1)
                for future in futures:
                    future.set_exception(error)
            else:
                for future in futures:
                    future.set_result(stall_s)

        self._check = threading.Thread(target=check, name="check", daemon=True)
        self._check.start()

    def _end_check(self) -> None:
        """Waits until the weights may change: the check of a rank other than 0 answers nobody, so the next load may
        come while it compares."""
        if self._check is not None:
            self._check.join()
            self._check = None

    # The engine's thread: giving the device to a trainer and taking the device back.

    def _sleep_now(self, futures: list[Future]) -> None:
        """Sleeps, or answers that requests are in flight; every rank decides alike."""
        if self._engine.has_unfinished_requests():
            return _answer(futures, f"sleep: {len(self._in_flight)} requests are in flight; wait for them first")
        if not self._asleep:
            self._end_check()
            self._engine.reset_prefix_cache()
            if platform.can_sleep():
                self._engine.sleep(level=1)
        self._asleep = {"weights", "kv_cache"}
        _answer(futures)

    def _wake_now(self, part: str, futures: list[Future]) -> None:
        if part == "kv_cache" and "weights" in self._asleep:
            return _answer(futures, "wake=kv_cache: the weights are still asleep; wake them first")
        if part in self._asleep and platform.can_sleep():
            self._engine.wake_up(tags=[part])
        self._asleep.discard(part)
        _answer(futures)


def _future() -> Future:
    """A future that its caller cannot cancel, because the engine's thread sets its result."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future


def _answer(futures: list[Future], error: str = "") -> None:
    """Answers a command with None, or with a RuntimeError."""
    for future in futures:
        future.set_exception(RuntimeError(error)) if error else future.set_result(None)


def _refuse(future: Future | None, request: Request, error: Exception) -> None:
    """Answers a request that vLLM refuses with a ValueError."""
    if future is not None:
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())  # xgrammar's own words are the cause
        future.set_exception(ValueError(f"prompt of {len(request.tokens)} tokens: {reason}"))

"""A vLLM engine on a thread of its own, driven by commands.

One thread owns the engine: the thread drains commands, steps while there is work, and sleeps when idle. With tensor
parallelism every rank runs such a thread. Rank 0 broadcasts the next command, because ranks that stepped different
schedules would wait for each other forever. An error that ends the thread is raised from every waiting call.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from vllm import LLMEngine
from vllm.exceptions import VLLMClientError

from torchtitan_rl import platform
from torchtitan_rl.config.actors import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.model import vllm_internals, vllm_model
from torchtitan_rl.model.engine_args import engine_args
from torchtitan_rl.model.engine_requests import completion, engine_params, scores
from torchtitan_rl.model.spec import build_spec
from torchtitan_rl.types import Request

__all__ = ["Engine", "engine_args"]

logger = logging.getLogger(__name__)

_CLOSE_S = 60.0
_IDLE_WAIT_S = 0.5  # an idle rank 0 broadcasts this often, well within the collective's time limit


@dataclass(slots=True)
class _InFlight:
    engine_id: str
    version_starts: list[tuple[int, int]]
    """(number of tokens already sampled, policy version from there on)."""
    future: Future | None
    """The caller's future; None on ranks other than 0."""
    top_k: int = 0
    """`Request.top_k` of a scoring request."""


@dataclass(slots=True)
class _Command:
    """An instruction that every rank executes before the next engine step. Data only: rank 0 broadcasts commands."""

    kind: Literal["add", "load", "sleep", "wake"] = "add"
    argument: Any = field(default_factory=list)
    """`add`: a list of (request id, request). `load`: a policy version. `wake`: a part's name. `sleep`: unused."""


class Engine:
    """`submit` requests and `load` weights from any thread of rank 0's process; both return futures."""

    def __init__(self, config: GeneratorConfig, model_dir: str, seed: int, rank: int, *, sleeps: bool = False):
        self._config, self._model_dir, self._seed, self._sleeps = config, model_dir, seed, sleeps
        self._spec = build_spec(ModelConfig(assets=model_dir))
        self._held = vllm_model.whole_parameters(self._spec, config.dtype)
        self._leads = rank == 0
        self._commands: queue.SimpleQueue[tuple[_Command, list[Future]]] = queue.SimpleQueue()
        self._probes: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._in_flight: dict[str, _InFlight] = {}
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._asleep: set[str] = set()
        self._current: list[Future] = []
        """Futures of the command being executed."""
        self._do: dict[str, Callable[[Any, list[Future]], None]] = {
            "add": self._add_all,
            "load": self._load_staged,
            "sleep": self._sleep_now,
            "wake": self._wake_now,
        }
        self._counter = 0
        self._failure: BaseException | None = None
        self.policy_version, self._num_loads = -1, 0
        self.ready: Future = Future()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # Methods that the actor calls.

    def submit(self, requests: list[Request]) -> list[Future]:
        """Admits requests together, in order, before the next engine step; returns a future per request.

        The future of a sampling request gives a Completion. The future of a scoring request gives one log-probability
        per token but the first; with `top_k`, a pair of tensors (T - 1, top_k): tokens and log-probabilities."""
        command, futures = _Command(), []
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
        """Copies a staged version into the model between two engine steps. Every rank must have staged the version."""
        return self._ask(_Command("load", version))

    def sleep(self) -> Future:
        """Frees weights and KV cache on a device shared with a trainer. Raises RuntimeError while requests run."""
        return self._ask(_Command("sleep"))

    def wake(self, part: str) -> Future:
        """Brings back `"weights"` or `"kv_cache"`; the cache comes back empty."""
        return self._ask(_Command("wake", part))

    def probe(self) -> Future:
        """A sign of life of the engine's thread, between two iterations. Not an instruction: other ranks do not see
        it."""
        future: Future = Future()
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

    def held(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every unsharded parameter that the model takes, by torchtitan's name."""
        return self._held

    def from_hf(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Renames tensors from Hugging Face's names to torchtitan's."""
        return self._spec.state_dict_adapter(self._spec.model, None).from_hf(tensors)

    def _ask(self, command: _Command) -> Future:
        future: Future = Future()
        self._send(command, [future])
        return future

    def _send(self, command: _Command, futures: list[Future]) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine has stopped: {self._failure!r}")
        self._commands.put((command, futures))
        if self._failure is not None:  # the thread died after the first check and may have missed this command
            self._fail_waiting()

    # Methods that run on the engine's thread.

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

    def _fail_waiting(self) -> None:
        waiting = [request.future for request in self._in_flight.values()] + self._current
        while not self._commands.empty():
            waiting += self._commands.get_nowait()[1]
        while not self._probes.empty():
            waiting.append(self._probes.get_nowait())
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

    def _iterate(self) -> None:
        """Executes one command, then takes one engine step if there is work."""
        while not self._probes.empty():
            self._probes.get_nowait().set_result(None)
        command, futures = self._next()
        self._current = futures
        self._do[command.kind](command.argument, futures)
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

    def _load_staged(self, version: int, futures: list[Future]) -> None:
        assert "weights" not in self._asleep, "dispatch wakes the weights before a pull"
        tensors = self._staged.pop(version)
        if self._config.model_impl == "vllm":  # vLLM's own Qwen3 takes Hugging Face's names and repacks weights
            head = tensors["lm_head.weight"]
            tensors = self._spec.state_dict_adapter(self._spec.model, None).to_hf(tensors) | {"lm_head.weight": head}
            vllm_internals.reload_weights(self._engine, tensors)
        else:
            with torch.inference_mode():
                self.model.load_weights(tensors.items())
                if wrong := self.model.differs_from(tensors.items()) if self._config.verify_loaded else "":
                    raise RuntimeError(
                        f"policy_version={version}: the engine holds other values of {wrong} than were sent"
                    )
        self.policy_version, self._num_loads = version, self._num_loads + 1
        for request in self._in_flight.values():
            request.version_starts.append((vllm_internals.num_sampled(self._engine, request.engine_id), version))
        # Requests carry the number of loads as cache salt, so old blocks never match; the reset frees old blocks.
        if not self._engine.has_unfinished_requests() and not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be reset after a pull")
        for future in futures:
            future.set_result(None)

    def _add_all(self, requests: list[tuple[str, Request]], futures: list[Future]) -> None:
        for index, (request_id, request) in enumerate(requests):
            self._add(request_id, request, futures[index] if self._leads else None)

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
            engine_id = self._engine.add_request(request_id, prompt, engine_params(request))
        except (ValueError, TypeError, VLLMClientError) as error:  # the request is at fault, not the engine
            if future is not None:
                future.set_exception(ValueError(f"prompt of {len(request.tokens)} tokens: {error}"))
            return
        self._in_flight[request_id] = _InFlight(engine_id, [(0, self.policy_version)], future, request.top_k)

    def _finish(self, output) -> None:
        request = self._in_flight.pop(output.request_id)
        if request.future is None:
            return
        scored = output.prompt_logprobs is not None
        request.future.set_result(
            scores(output, request.top_k) if scored else completion(output, request.version_starts)
        )

    # Giving the device to a trainer and taking the device back.

    def _sleep_now(self, _: Any, futures: list[Future]) -> None:
        """Sleeps, or answers that requests are in flight; every rank decides alike."""
        if self._engine.has_unfinished_requests():
            error = f"sleep: {len(self._in_flight)} requests are in flight; wait for them first"
            return _answer(futures, error)
        if not self._asleep:
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


def _answer(futures: list[Future], error: str = "") -> None:
    for future in futures:
        future.set_exception(RuntimeError(error)) if error else future.set_result(None)

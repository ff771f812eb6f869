"""A vLLM engine on a thread of its own, driven by commands.

One thread owns the engine: the thread drains commands, steps while there is work, and sleeps when idle. With tensor
parallelism every rank runs such a thread. Rank 0 broadcasts the next command, because ranks that stepped different
schedules would wait for each other forever. An error that ends the thread is raised from every waiting call.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import Future
from typing import Any

import torch
from vllm import LLMEngine
from vllm.model_executor.models.registry import ModelRegistry

from torchtitan_rl import platform
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.engine import noise, vllm_internals, vllm_model
from torchtitan_rl.engine.arguments import engine_args
from torchtitan_rl.engine.engine_steps import Command, EngineSteps
from torchtitan_rl.model.spec import build_spec

__all__ = ["Engine", "engine_args"]

logger = logging.getLogger(__name__)

_CLOSE_S = 60.0


class Engine(EngineSteps):
    """An engine and its thread. Further commands free a device that is shared with a trainer."""

    def __init__(self, config: GeneratorConfig, model_dir: str, seed: int, rank: int, *, sleeps: bool = False):
        super().__init__(config, build_spec(ModelConfig(assets=model_dir)), leads=rank == 0)
        self._model_dir, self._seed, self._sleeps = model_dir, seed, sleeps
        self._do |= {"sleep": self._sleep_now, "wake": self._wake_now}
        if config.on_update != "keep":
            self._do["load"] = self._update
        self.ready: Future = Future()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # Methods that the actor calls.

    def sleep(self) -> Future:
        """Frees weights and KV cache on a device shared with a trainer. Raises RuntimeError while requests run."""
        return self._ask(Command("sleep"))

    def wake(self, part: str) -> Future:
        """Brings back `"weights"` or `"kv_cache"`; the cache comes back empty."""
        return self._ask(Command("wake", part))

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

    def from_hf(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Renames tensors from Hugging Face's names to torchtitan's."""
        return self._spec.state_dict_adapter(self._spec.model, None).from_hf(tensors)

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
        ModelRegistry.register_model(vllm_model.ARCHITECTURE, vllm_model.TorchtitanQwen3ForCausalLM)
        args = engine_args(self._config, self._model_dir, self._seed, sleeps=self._sleeps)
        with (
            vllm_internals.private_shared_memory(),
            vllm_internals.nameless_semaphores(),
            vllm_internals.zeroed_blocks(),
            vllm_internals.chosen_model_runner(self._config.model_runner),
        ):
            engine = LLMEngine.from_engine_args(args)
        self.model = vllm_internals.model(engine)
        self.model_runner = vllm_internals.model_runner(engine)
        if self.model_runner == "v1":
            noise.install(vllm_internals.runner(engine), self._seed)
        return engine

    # New weights under requests.

    def _check_beside(
        self, version: int, tensors: dict[str, torch.Tensor], futures: list[Future], stall_s: float
    ) -> None:
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

        threading.Thread(target=check, name="check", daemon=True).start()

    def _update(self, version: int, futures: list[Future]) -> None:
        """Loads a version; requests that are in flight end first, or have their attention cache computed again."""
        while self._config.on_update == "wait" and self._has_work():
            self._step()
        self._load_staged(version, futures)
        if self._config.on_update == "recompute":
            self._engine.reset_prefix_cache(reset_running_requests=True)

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
        self._asleep, self._do["add"] = {"weights", "kv_cache"}, self._refuse
        _answer(futures)

    def _wake_now(self, part: str, futures: list[Future]) -> None:
        if part == "kv_cache" and "weights" in self._asleep:
            return _answer(futures, "wake=kv_cache: the weights are still asleep; wake them first")
        if part in self._asleep and platform.can_sleep():
            self._engine.wake_up(tags=[part])
        self._asleep.discard(part)
        if not self._asleep:
            self._do["add"] = self._add_all
        _answer(futures)

    def _refuse(self, _: Any, futures: list[Future]) -> None:
        _answer(
            futures,
            f"asleep={sorted(self._asleep)}: the generator gave its device to a trainer; sample through a "
            "SamplingClient, which wakes it",
        )


def _answer(futures: list[Future], error: str = "") -> None:
    for future in futures:
        future.set_exception(RuntimeError(error)) if error else future.set_result(None)

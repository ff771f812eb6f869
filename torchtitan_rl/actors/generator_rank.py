"""One generator rank without actors: an engine, and the fetching of weights for the engine."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from torchtitan_rl import platform
from torchtitan_rl.actors.profiling import profiled
from torchtitan_rl.actors.ticket import Ticket
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.engine.engine import Engine
from torchtitan_rl.model.files import weight_files
from torchtitan_rl.record.schedule import Schedules
from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import Request
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.difference import explain_difference
from torchtitan_rl.weights.pieces import AnyManifest
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["GeneratorRank"]

logger = logging.getLogger(__name__)


class GeneratorRank:
    """A vLLM engine on a thread. Calls overlap: requests of all callers are batched continuously.

    With tensor parallelism only rank 0 gets requests to sample or score; every rank gets `fetch`.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        seed: int,
        rank: int,
        store: VersionedStore,
        *,
        sleeps: bool = False,
        role: str = "generator-0",
        schedules: Schedules | None = None,
    ):
        """`model.assets` is a directory with a config.json and the tokenizer. `sleeps`: the engine shares devices with
        trainers; `sleep` frees the devices. `schedules`: see `Engine`."""
        self.store = store
        self._tickets: dict[int, Ticket] = {}
        """Those with requests that are not answered."""
        self.engine = Engine(config, model, seed, rank, sleeps=sleeps, role=role, schedules=schedules)

    async def start(self, num_threads: int) -> None:
        """Builds the engine, with random weights until the first `load`."""
        self.engine.start()
        await asyncio.wrap_future(self.engine.ready)
        platform.set_threads(num_threads)  # vLLM's worker has set another number
        logger.info(
            "engine ready: %s, vLLM's model runner %s, threads %d",
            type(self.engine.model).__name__,
            self.engine.model_runner,
            torch.get_num_threads(),
        )

    async def sample(self, ticket: int, requests: list[Request]) -> list[tuple[int, Any]]:
        """Admits requests under a ticket, and returns the answers that are there, each with the index of its request;
        waits for the first. Without requests: the next answers of the ticket.

        An answer is a Completion (or log-probabilities, where `params` is None), a ValueError for an invalid request,
        and None for one that was cancelled. An error of the engine is raised.
        """
        waiting = Ticket(self.engine.submit(requests)) if requests else self._tickets.pop(ticket)
        answers = [(index, future.exception() or future.result()) for index, future in await waiting.next()]
        for _, answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, ValueError):
                raise answer
        if not waiting.is_over:
            self._tickets[ticket] = waiting
        return answers

    async def cancel(self, numbers: list[int]) -> None:
        """Takes the requests with these `Request.number` out of the engine; those that are not in it are answered."""
        await asyncio.shield(asyncio.wrap_future(self.engine.cancel(numbers)))

    async def fetch(self, manifest: AnyManifest, verify: bool) -> ValueError | None:
        """Stages the version of a manifest. Returns why its tensors do not fit this model; None where they do."""
        version = manifest.version
        assert isinstance(version, int), "names are for other trainer roles"
        with span("fetch weights", version=version):
            whole, payload = await self.store.read(manifest, verify=verify)
            if self.engine.adapter_specs:
                return await self._stage_adapters(version, whole, payload, verify)
            if difference := _difference(whole, self.engine.parameter_specs):
                return ValueError(f"policy_version={version}: does not fit this generator: {difference}")
            tensors = layout.read(payload, whole)
            if name := self.engine.unequal_tie(tensors):
                return ValueError(f"policy_version={version}: {name} differs from the tensor that it is tied to")
            self.engine.stage(version, tensors)
            return None

    async def _stage_adapters(
        self, version: int, manifest: layout.Manifest, payload: torch.Tensor, verify: bool
    ) -> ValueError | None:
        """Stages adapters, and before those of another base than the engine holds that base."""
        if not manifest.base:
            return ValueError(
                f"policy_version={version}: has adapters merged into its weights, and this generator holds adapters "
                "apart from their base; publish the adapters alone, or use generator.max_adapters=0"
            )
        if difference := _difference(manifest, self.engine.adapter_specs):
            return ValueError(f"policy_version={version}: does not fit this generator's adapters: {difference}")
        base = None
        if manifest.base != self.engine.base:
            base_manifest, base_payload = await self.store.fetch(manifest.base, verify=verify)
            if difference := _difference(base_manifest, self.engine.parameter_specs):
                return ValueError(f"{manifest.base}: does not fit this generator: {difference}")
            tensors = layout.read(base_payload, base_manifest)
            if name := self.engine.unequal_tie(tensors):
                return ValueError(f"{manifest.base}: {name} differs from the tensor that it is tied to")
            base = manifest.base, tensors
        self.engine.stage_adapters(version, layout.read(payload, manifest), base)
        return None

    async def fetch_hf(self, directory: str, version: int) -> None:
        """Stages weights from a Hugging Face directory. Raises RuntimeError for a file that cannot be read, and for
        tensors that do not fit this model."""
        tensors = {}
        for file in weight_files(Path(directory)):
            try:
                with safe_open(file, "pt") as weights:
                    tensors.update({name: weights.get_tensor(name) for name in weights.keys()})
            except SafetensorError as error:
                raise RuntimeError(
                    f"checkpoint={directory!r}: {file.name} cannot be read ({error}); copy it again"
                ) from None
        try:
            specs = self.engine.parameter_specs
            with platform.one_thread():  # see `_cast`
                state = self.engine.from_hf(tensors)
        except KeyError as error:
            raise RuntimeError(
                f"checkpoint={directory!r}: does not fit this config's model: {error} is of no part of it; give the "
                "directory of a model of this family"
            ) from None
        entries = {  # in the engine's dtype: the file's own may be another
            name: layout.TensorEntry(tuple(tensor.shape), specs.get(name, ((), tensor.dtype))[1], 0)
            for name, tensor in state.items()
        }
        if difference := explain_difference(entries, specs):
            raise RuntimeError(f"checkpoint={directory!r}: does not fit this config's model: {difference}")
        self.engine.stage(version, _cast(state, {name: dtype for name, (_, dtype) in specs.items()}))

    async def load(self, version: int) -> float | ValueError:
        """Copies the fetched version into the model between two engine steps and resets the prefix cache. Returns the
        seconds from one engine step to the next, or why the version cannot be loaded: the engine stands still then,
        until a later load succeeds."""
        return await asyncio.shield(asyncio.wrap_future(self.engine.load(version)))

    async def load_adapters(self, version: int, slot: int) -> float | ValueError:
        """Copies fetched adapters into a slot between two engine steps. Returns the seconds it took, or why they cannot
        be loaded: the slot is empty then."""
        return await asyncio.shield(asyncio.wrap_future(self.engine.load_adapters(version, slot)))

    async def profile(self, file: str) -> None:
        """Begins to profile this process; with `file`, ends and writes the trace there."""
        profiled(file)

    async def probe(self) -> None:
        """Returns once the engine's thread has answered."""
        await asyncio.shield(asyncio.wrap_future(self.engine.probe()))

    async def sleep(self) -> None:
        """Frees weights and KV cache on the device. Raises RuntimeError while requests run."""
        await asyncio.shield(asyncio.wrap_future(self.engine.sleep()))

    async def wake(self, part: str) -> None:
        """Brings `"weights"` or `"kv_cache"` back."""
        await asyncio.shield(asyncio.wrap_future(self.engine.wake(part)))

    async def weights(self) -> dict[str, torch.Tensor]:
        """This rank's parameters under torchtitan's names, in host memory, for tests and debugging of small models."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.engine.model.canonical_state().items()}

    async def modules(self) -> list[str]:
        """Qualified class names of the model's modules, for tests."""
        return [f"{type(m).__module__}.{type(m).__qualname__}" for m in self.engine.model.modules()]

    async def abort(self) -> None:
        """Does nothing: an engine's thread has ended, or hangs and cannot be ended. The actor's endpoint of this name
        ends the process."""


def _cast(tensors: dict[str, torch.Tensor], dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    """Tensors in the dtypes of the same names. No operator runs on several threads: libgomp would keep them for this
    thread, and the threads of the engine's operators would spin for less long (`environment.default_environment`)."""
    cast = platform.in_threads(lambda name: tensors[name].to(dtypes[name]), list(tensors))
    return dict(zip(tensors, cast, strict=True))


def _difference(manifest: layout.Manifest, specs: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    """How the tensors of a version differ from those that an engine takes, in words; empty: in nothing."""
    published = {name: (entry.shape, entry.dtype) for name, entry in manifest.entries.items()}
    return "" if published == specs else explain_difference(manifest.entries, specs)

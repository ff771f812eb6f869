"""The models that clients train: several sets of adapters over one base, or one model with all of its parameters.

Requests of one model are submitted to the trainer in their order, without waiting for answers. Before a request of
another model the trainer exchanges the adapters (`actors.adapter_slots`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.serve.tinker.bodies import CreateModelBody
from torchtitan_rl.serve.tinker.faults import Fault, fault_of, user
from torchtitan_rl.serve.tinker.futures import Futures, ReadyBody
from torchtitan_rl.serve.tinker.order import InOrder, QueueRoom, Start
from torchtitan_rl.serve.tinker.saved_states import ModelRecord, SavedStates

__all__ = ["Model", "ModelPlaces", "Models", "json_answer", "quietly", "ready", "then"]

_VERSIONS_APART = 1_000_000
"""Versions of a model are counted from a multiple of this, so that no two models share one."""
_LOOK_S = 1.0  # between two looks for models whose client has gone, while somebody waits for a place


@dataclass(slots=True, eq=False)
class Model:
    """A model that is in the trainer."""

    record: ModelRecord
    session_id: str
    order: InOrder
    models: Models
    """Those of the model's owner."""

    @property
    def model_id(self) -> str:
        return self.record.model_id


class ModelPlaces:
    """The places for models in the trainer, for which the models of all owners compete."""

    def __init__(self, trainer: TrainingClient, *, lora: LoRAConfig | None, max_models: int, wait_s: float) -> None:
        """`lora`: the largest rank, and alpha; None: there is one place, for a model that trains all parameters. A new
        model waits at most `wait_s` seconds for a place."""
        self.trainer, self.lora = trainer, lora
        self._number, self._wait_s = max_models if lora is not None else 1, wait_s
        self._models: list[Model] = []
        self.used: Model | None = None
        """The model that the trainer's next call is for."""
        self.saving = asyncio.Lock()
        """Held from the copy of a checkpoint until it is on disk: a trainer writes one at a time."""
        self.rooms = (
            QueueRoom(max_requests=256, max_bytes=2**26, whole=QueueRoom(max_requests=4096, max_bytes=2**28)),
            QueueRoom(max_requests=4096, max_bytes=2**29, whole=QueueRoom(max_requests=2**14, max_bytes=2**30)),
        )
        """Of one model, the room for requests that came before their turn, and for those that are not answered yet; the
        whole rooms are those of all owners' models."""
        self._num_bases = 0
        self._queue = asyncio.Lock()  # first come, first served
        self._num_waiting = 0
        self._freed = asyncio.Event()

    def free(self) -> bool:
        """Whether a new model gets a place at once."""
        return len(self._models) < self._number and not self._num_waiting

    def occupy(self, model: Model) -> None:
        """Gives the model a place, and the trainer's next call."""
        self._models.append(model)
        self.used = model

    def vacate(self, model: Model) -> None:
        if model in self._models:
            self._models.remove(model)
        if self.used is model:
            self.used = None
        self._freed.set()

    async def wait(self, model: Model) -> None:
        """Returns when a place is free, before anything else runs. A model whose client has gone makes place for the
        one that waits. Raises Fault when no place became free in time, and at once where the session that asks has all
        the places itself."""
        full = len(self._models) >= self._number
        if full and all(occupant.session_id == model.session_id for occupant in self._models):
            raise user(f"{self._full()} end a session, or {self._larger()}")
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._wait_s), self._queue:
                while len(self._models) >= self._number:
                    self._freed.clear()
                    self._remove_silent()
                    if len(self._models) >= self._number:
                        await _set_within(self._freed, _LOOK_S)
        except TimeoutError:
            raise user(
                f"{self._full()} none became free within {self._wait_s:g} s; wait until a client ends its session, or "
                + self._larger()
            ) from None
        finally:
            self._num_waiting -= 1

    def _remove_silent(self) -> None:
        for model in list(self._models):
            if model.models.silent(model.session_id):
                model.models.remove(model, "its session gave no sign of life, and another model needed its place")

    def _full(self) -> str:
        return f"models={len(self._models)}: as many as this server trains at once;"

    def _larger(self) -> str:
        return "start the server with a larger --max-models" + (
            "" if self.lora is not None else " and trainer.lora (now all parameters of one model train)"
        )

    def next_versions(self) -> int:
        """The first of versions that no model has had."""
        self._num_bases += 1
        return self._num_bases * _VERSIONS_APART


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when an event is set, and after `timeout_s` in any case."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass


class Models:
    """The models of one owner."""

    def __init__(
        self,
        places: ModelPlaces,
        checkpoints: SavedStates,
        futures: Futures,
        *,
        base_model: str,
        base_dir: Path,
        vocab_size: int,
        end_tokens: dict[str, int],
        silent: Callable[[str], bool],
        hear: Callable[[str], None],
    ) -> None:
        """`base_dir`: the Hugging Face directory from which a model begins that trains all parameters.
        `end_tokens`: the ids "eos" and "pad" of the tokenizer. `silent(session_id)`: whether a session's client has
        gone; `hear(session_id)`: takes note of a sign of life."""
        self.places, self.trainer, self.lora, self._futures = places, places.trainer, places.lora, futures
        self.checkpoints, self.base_model, self._base_dir = checkpoints, base_model, base_dir
        self.vocab_size, self.end_tokens, self.silent, self._hear = vocab_size, end_tokens, silent, hear
        self.live: dict[str, Model] = {}

    # Life of a model.

    def create(self, body: CreateModelBody) -> str:
        """A new model. Returns the id of the future."""
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        request_id = f"create/{model_id}"
        if request_id in self._futures:
            return request_id
        try:
            if body.optimizer_config.type != "adamw":
                raise user(f"optimizer_config.type={body.optimizer_config.type[:40]!r}: is not offered; use 'adamw'")
            lora = body.lora_config
            record = self.accepted(
                ModelRecord(
                    model_id=model_id,
                    base_model=body.base_model,
                    lora_rank=0 if lora is None else lora.rank,
                    train_attn=lora is None or lora.train_attn,
                    train_mlp=lora is None or lora.train_mlp,
                    user_metadata=body.user_metadata,
                )
            )
            seed = secrets.randbits(31) if lora is None or lora.seed is None else lora.seed % 2**63
            model = self.new(record, body.session_id)
            added = self._added(model, self.add(model, seed))
        except Exception as error:
            return self._futures.refuse(fault_of(error))
        self._futures.start(request_id, then(added, {"model_id": model_id, "type": "create_model"}))
        return request_id

    async def _added(self, model: Model, added: Awaitable[None]) -> None:
        """Waits until the trainer has a new model. One that it cannot make gives its place back."""
        try:
            await added
        except Exception:
            if self.live.get(model.model_id) is model:
                self.remove(model, "it could not be made")
            raise

    def accepted(self, record: ModelRecord) -> ModelRecord:
        """Raises Fault for a model that this server does not train."""
        if record.base_model not in (self.base_model, Path(self.base_model).name):
            raise user(f"base_model={record.base_model[:120]!r}: is not served here; use {self.base_model!r}")
        record.base_model = self.base_model
        if self.lora is None and record.lora_rank:
            record.lora_rank = 0  # every SDK asks for adapters; training all parameters is the server's setting
            record.train_attn = record.train_mlp = True
        elif self.lora is not None:
            if not 1 <= record.lora_rank <= self.lora.rank:
                raise user(f"lora_config.rank={record.lora_rank}: must be 1 to {self.lora.rank} (trainer.lora.rank)")
            if not record.parts:
                raise user("lora_config: neither attention nor MLP layers train; set train_attn or train_mlp")
        return record

    def new(self, record: ModelRecord, session_id: str) -> Model:
        """A model that `add` puts into the trainer, with rooms of its own for its requests."""
        ahead, started = (dataclasses.replace(room) for room in self.places.rooms)
        return Model(record, session_id, InOrder(self._futures, ahead=ahead, started=started), self)

    def add(self, model: Model, seed: int) -> Awaitable[None]:
        """Puts a model into the trainer: at once where a place is free, else when one becomes free. What is returned
        raises Fault when none became free in time. Raises Fault for an id that a model has."""
        if model.model_id in self.live:
            raise user(f"model_id={model.model_id!r}: is in this server already; count model_seq_id on")
        return self._put(model, seed) if self.places.free() else self._put_later(model, seed)

    def _put(self, model: Model, seed: int) -> Awaitable[None]:
        self.checkpoints.describe(model.record)  # before anything is to be undone where the disk is full
        record, version = model.record, self.places.next_versions()
        if self.lora is not None:
            added = self.trainer.add_adapter(
                record.model_id, lora_rank=record.lora_rank, seed=seed, parts=record.parts, policy_version=version
            )
        else:
            added = asyncio.ensure_future(self._start_over(version))
        self.places.occupy(model)
        self.live[record.model_id] = model
        return added

    async def _put_later(self, model: Model, seed: int) -> None:
        await self.places.wait(model)
        if self.silent(model.session_id):
            raise user(f"session_id={model.session_id!r}: ended while its model waited for a place; make a new client")
        await self._put(model, seed)

    async def _start_over(self, version: int) -> None:
        await self.trainer.init_model(self._base_dir)
        await self.trainer.begin_model(version)

    def remove(self, model: Model, why: str) -> None:
        """Takes a model out of the trainer."""
        self.live.pop(model.model_id, None)
        model.order.close(f"model_id={model.model_id!r}: is unloaded ({why}); load its last saved state")
        if self.lora is not None:
            quietly(self.trainer.drop_adapter(model.model_id))
        self.places.vacate(model)

    def model(self, model_id: str) -> Model:
        """A model in the trainer. Raises Fault (user) for any other."""
        if (model := self.live.get(model_id)) is None:
            saved = [checkpoint.path for checkpoint in self.checkpoints.of(model_id)] if self._known(model_id) else []
            left = f"its last saved state is {saved[0]}" if saved else "it has saved no state"
            raise user(
                f"model_id={model_id[:120]!r}: is not in this server: it was unloaded, or the server started anew; "
                f"{left}; create a training client from a saved state, or a new one"
            )
        return model

    def _known(self, model_id: str) -> bool:
        return self.checkpoints.model(model_id) is not None

    # Requests of a model, in order.

    def submit(
        self,
        model_id: str,
        seq_id: int | None,
        start: Callable[[Model], Awaitable[Awaitable[ReadyBody]]],
        *,
        nbytes: int = 0,
    ) -> str:
        """Queues a request of `nbytes` in memory. Returns the id of its future; for a model that is not there the
        future has failed. Raises Refused (429) where there is no room for the request."""
        try:
            model = self.model(model_id)
        except Fault as fault:
            return self._futures.refuse(fault)
        self._hear(model.session_id)
        model.record.last_request = datetime.now(UTC).isoformat()
        request_id = f"model/{model_id}/{seq_id or secrets.token_hex(8)}"
        run: Start = lambda: start(model)  # noqa: E731
        return model.order.submit(seq_id or 0, request_id, run, nbytes=nbytes)

    def refuse(self, model_id: str, seq_id: int, fault: Fault) -> str:
        """A request that is not carried out fails at its place: the SDK gives its number to no other request."""

        async def start(model: Model) -> Awaitable[ReadyBody]:
            raise fault

        return self.submit(model_id, seq_id, start)

    def use(self, model: Model) -> None:
        """Makes a model the one that the next call is for. Nothing is awaited until that call is submitted."""
        if self.places.used is not model and self.lora is not None:
            quietly(self.trainer.use_adapter(model.model_id))
        self.places.used = model

    def unload(self, model_id: str) -> str:
        """Takes a model out of the trainer, after the requests before."""

        async def start(model: Model) -> Awaitable[ReadyBody]:
            asyncio.get_running_loop().call_soon(self.remove, model, "its client asked for it")
            return ready(json_answer({"model_id": model_id, "type": "unload_model"}))

        return self.submit(model_id, None, start)


def json_answer(content: dict) -> ReadyBody:
    return ReadyBody(content=json.dumps(content, allow_nan=False).encode())


async def ready(answer: ReadyBody) -> ReadyBody:
    return answer


async def then(awaitable: Awaitable, content: dict) -> ReadyBody:
    await awaitable
    return json_answer(content)


def quietly(future: asyncio.Future) -> None:
    """For a call whose failure the next call meets too."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

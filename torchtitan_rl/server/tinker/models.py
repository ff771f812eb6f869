"""The models that clients train: several sets of adapters over one base, or one model with all of its parameters.

Requests of one model are submitted to the trainer in their order, without waiting for answers. Before a request of
another model the trainer exchanges the adapters (`actors.adapter_slots`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from torchtitan_rl.config.actors import LoRAConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.server.tinker import losses, wire
from torchtitan_rl.server.tinker.bodies import AdamBody, CreateModelBody, LoadWeightsBody, SaveWeightsBody
from torchtitan_rl.server.tinker.checkpoints import Checkpoint, Checkpoints, ModelRecord
from torchtitan_rl.server.tinker.faults import Fault, user
from torchtitan_rl.server.tinker.futures import Answer, Futures
from torchtitan_rl.server.tinker.order import InOrder, Start
from torchtitan_rl.server.tinker.samplers import Versions
from torchtitan_rl.types import OptimParams

__all__ = ["Model", "Models", "json_answer"]

_VERSIONS_APART = 1_000_000
"""Versions of a model are counted from a multiple of this, so that no two models share one."""


@dataclass(slots=True, eq=False)
class Model:
    """A model that is in the trainer."""

    record: ModelRecord
    session_id: str
    order: InOrder

    @property
    def model_id(self) -> str:
        return self.record.model_id


class Models:
    """The models of a server."""

    def __init__(
        self,
        trainer: TrainingClient,
        versions: Versions,
        checkpoints: Checkpoints,
        futures: Futures,
        *,
        base_model: str,
        base_dir: Path,
        vocab_size: int,
        lora: LoRAConfig | None,
        max_models: int,
    ) -> None:
        """`lora`: the largest rank, and alpha; None: one model trains all parameters, from the Hugging Face directory
        `base_dir` on."""
        self._trainer, self._versions, self._futures = trainer, versions, futures
        self.checkpoints, self.base_model, self._base_dir, self._lora = checkpoints, base_model, base_dir, lora
        self._vocab_size, self._max_models = vocab_size, max_models if lora is not None else 1
        self.live: dict[str, Model] = {}
        self._used: Model | None = None
        self._num_bases = 0
        self._saving = asyncio.Lock()
        """Held from the copy of a checkpoint until it is on disk: a trainer writes one at a time."""
        self.stale: Callable[[str], bool] = lambda session_id: False
        """Whether a session's client has gone."""

    # Life of a model.

    def create(self, body: CreateModelBody) -> str:
        """A new model. Returns the id of the future."""
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        request_id = f"{model_id}:create"
        if request_id in self._futures:
            return request_id
        self._futures.reserve(request_id)
        try:
            if body.optimizer_config.type != "adamw":
                raise user(f"optimizer_config.type={body.optimizer_config.type[:40]!r}: is not offered; use 'adamw'")
            lora = body.lora_config
            record = self._record(
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
            added = self._add(record, body.session_id, seed)
        except Exception as error:
            self._futures.fail(request_id, error)
        else:
            self._futures.start(request_id, _then(added, {"model_id": model_id, "type": "create_model"}))
        return request_id

    def create_from(self, body: LoadWeightsBody) -> str:
        """A new model with the weights of a checkpoint. Returns the id of the future."""
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        request_id = f"{model_id}:0"
        if request_id in self._futures:
            return request_id
        self._futures.reserve(request_id)
        try:
            checkpoint, directory = self.checkpoints.find(body.path, "weights")
            saved = checkpoint.model
            record = ModelRecord(
                model_id=model_id,
                base_model=body.base_model or saved.base_model,
                lora_rank=saved.lora_rank,
                train_attn=saved.train_attn,
                train_mlp=saved.train_mlp,
                user_metadata=body.user_metadata,
            )
            if saved.lora_rank or self._lora is not None:
                record = self._record(record)
            added = self._add(record, str(body.session_id), 0)
        except Exception as error:
            self._futures.fail(request_id, error)
        else:
            loading = self._added_and_loaded(added, self.live[model_id], directory, body.optimizer)
            self._futures.start(request_id, loading)
        return request_id

    async def _added_and_loaded(self, added: Awaitable, model: Model, directory: Path, optimizer: bool) -> Answer:
        await added
        return await self._load(model, directory, optimizer)

    def _record(self, record: ModelRecord) -> ModelRecord:
        """Raises Fault for a model that this server does not train."""
        if record.base_model not in (self.base_model, Path(self.base_model).name):
            raise user(f"base_model={record.base_model[:120]!r}: is not served here; use {self.base_model!r}")
        record.base_model = self.base_model
        if self._lora is None and record.lora_rank:
            record.lora_rank = 0  # every SDK asks for adapters; training all parameters is the server's setting
            record.train_attn = record.train_mlp = True
        elif self._lora is not None:
            if not 1 <= record.lora_rank <= self._lora.rank:
                raise user(f"lora_config.rank={record.lora_rank}: must be 1 to {self._lora.rank} (trainer.lora.rank)")
            if not record.parts:
                raise user("lora_config: neither attention nor MLP layers train; set train_attn or train_mlp")
        return record

    def _add(self, record: ModelRecord, session_id: str, seed: int) -> Awaitable[None]:
        """Puts a model into the trainer. Raises Fault when there are too many."""
        for model in [model for model in self.live.values() if self.stale(model.session_id)]:
            self.remove(model, "its session gave no sign of life, and another model needed its place")
        if len(self.live) >= self._max_models:
            raise user(
                f"models={len(self.live)}: as many as this server trains at once; end a session, or start the server "
                "with a larger --max-models"
                + ("" if self._lora is not None else " and trainer.lora (now all parameters of one model train)")
            )
        self._num_bases += 1
        version = self._num_bases * _VERSIONS_APART
        if self._lora is not None:
            added = self._trainer.add_adapter(
                record.model_id, lora_rank=record.lora_rank, seed=seed, parts=record.parts, policy_version=version
            )
        else:
            added = asyncio.ensure_future(self._start_over(version))
        model = Model(record, session_id, InOrder(self._futures))
        self.live[record.model_id] = self._used = model
        self.checkpoints.describe(record)
        return added

    async def _start_over(self, version: int) -> None:
        await self._trainer.init_model(self._base_dir)
        await self._trainer.begin_model(version)

    def remove(self, model: Model, why: str) -> None:
        """Takes a model out of the trainer."""
        self.live.pop(model.model_id, None)
        model.order.close(f"model_id={model.model_id!r}: is unloaded ({why}); load its last saved state")
        if self._lora is not None:
            _quietly(self._trainer.drop_adapter(model.model_id))
        if self._used is model:
            self._used = None

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

    def submit(self, model_id: str, seq_id: int | None, start: Callable[[Model], Awaitable[Awaitable[Answer]]]) -> str:
        """Queues a request. Returns the id of its future; a model that is not there fails the future."""
        try:
            model = self.model(model_id)
        except Fault as fault:
            request_id = f"{model_id[:128]}:{seq_id}:{secrets.token_hex(4)}"
            self._futures.reserve(request_id)
            self._futures.fail(request_id, fault)
            return request_id
        model.record.last_request = datetime.now(UTC).isoformat()
        request_id = f"{model_id}:{seq_id or secrets.token_hex(8)}"
        run: Start = lambda: start(model)  # noqa: E731
        model.order.submit(seq_id or 0, request_id, run)
        return request_id

    def _use(self, model: Model) -> None:
        """Makes a model the one that the next call is for. Nothing is awaited until that call is submitted."""
        if self._used is not model and self._lora is not None:
            _quietly(self._trainer.use_adapter(model.model_id))
        self._used = model

    def train(self, asked: wire.Training) -> str:
        """A forward pass, with a backward pass unless `forward_only`."""

        async def start(model: Model) -> Awaitable[Answer]:
            loss, arguments = losses.loss_of(asked.loss_fn, asked.loss_config)
            data = losses.datums(asked.data, asked.loss_fn, loss, vocab_size=self._vocab_size)
            self._use(model)
            if asked.forward_only:
                return _outputs(
                    self._trainer.forward(data, temperature=1.0),
                    lambda logprobs: losses.value(loss, arguments, data, logprobs),
                )
            return _outputs(
                self._trainer.forward_backward(data, loss.function, loss_config=arguments, temperature=1.0), None
            )

        return self.submit(asked.model_id, asked.seq_id, start)

    def step(self, model_id: str, seq_id: int | None, adam: AdamBody) -> str:
        """An optimizer step."""

        async def start(model: Model) -> Awaitable[Answer]:
            if adam.type != "adamw":
                raise user(f"optim_params.type={adam.type[:40]!r}: is not offered; use AdamParams")
            self._use(model)
            if self._lora is not None and len(model.record.parts) < 2:
                _quietly(self._trainer.freeze_untrained())
            params = OptimParams(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
                max_grad_norm=adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf"),
            )
            return _stepped(self._trainer.optim_step(params))

        return self.submit(model_id, seq_id, start)

    def save(self, body: SaveWeightsBody) -> str:
        """A checkpoint to train on, with the optimizer's state."""

        async def start(model: Model) -> Awaitable[Answer]:
            name = body.path or f"seq-{body.seq_id or 0:06d}"
            await self._saving.acquire()
            try:
                directory = self.checkpoints.begin(model.record, "weights", name, overwrite=body.overwrite)
                self._use(model)
                await self._trainer.stage_checkpoint(directory)
            except BaseException:
                self._saving.release()
                raise
            return self._written(model, name, body)

        return self.submit(body.model_id, body.seq_id, start)

    async def _written(self, model: Model, name: str, body: SaveWeightsBody) -> Answer:
        try:
            await self._trainer.checkpoint_written()
            saved = self.checkpoints.commit(
                model.record, "weights", name, ttl_s=body.ttl_seconds, metadata=body.user_metadata
            )
        finally:
            self._saving.release()
        return json_answer({"path": saved.path, "type": "save_weights"})

    def save_for_sampler(
        self, body: SaveWeightsBody, session_of: Callable[[Model, int, Checkpoint | None], dict[str, str]]
    ) -> str:
        """Weights to sample from: published, and with a name also on disk. `session_of(model, version, checkpoint)`
        gives the answer."""

        async def start(model: Model) -> Awaitable[Answer]:
            writing = None
            if body.path is not None:
                writing = self.checkpoints.begin(model.record, "sampler_weights", body.path, overwrite=body.overwrite)
            self._use(model)
            version = await self._versions.publish()

            async def kept() -> Answer:
                saved = None
                if writing is not None:
                    await self._versions.save(version, writing / "weights.safetensors")
                    saved = self.checkpoints.commit(
                        model.record, "sampler_weights", body.path, ttl_s=body.ttl_seconds, metadata=body.user_metadata
                    )
                return json_answer(session_of(model, version, saved) | {"type": "save_weights_for_sampler"})

            return kept()

        return self.submit(body.model_id, body.seq_id, start)

    def load(self, body: LoadWeightsBody) -> str:
        """Replaces a model's weights by a checkpoint's, and with `optimizer` its optimizer's state."""

        async def start(model: Model) -> Awaitable[Answer]:
            checkpoint, directory = self.checkpoints.find(body.path, "weights")
            if checkpoint.model.lora_rank != model.record.lora_rank:
                raise user(
                    f"path={body.path[:120]!r}: has adapters of rank {checkpoint.model.lora_rank}, the model of rank "
                    f"{model.record.lora_rank}; create a training client from the checkpoint"
                )
            return _ready(await self._load(model, directory, body.optimizer))

        return self.submit(str(body.model_id), body.seq_id, start)

    async def _load(self, model: Model, directory: Path, optimizer: bool) -> Answer:
        self._use(model)
        self._num_bases += 1  # other weights under a version that is known would be taken for the known ones
        version = self._num_bases * _VERSIONS_APART
        await self._trainer.load_checkpoint(directory, policy_version=version, optimizer=optimizer)
        return json_answer({"path": str(directory.name), "type": "load_weights"})

    def unload(self, model_id: str) -> str:
        """Takes a model out of the trainer, after the requests before."""

        async def start(model: Model) -> Awaitable[Answer]:
            asyncio.get_running_loop().call_soon(self.remove, model, "its client asked for it")
            return _ready(json_answer({"model_id": model_id, "type": "unload_model"}))

        return self.submit(model_id, None, start)


async def _outputs(answering: Awaitable, loss_of_logprobs) -> Answer:
    output = await answering
    logprobs = output.policy_logprobs
    loss = output.loss if loss_of_logprobs is None else loss_of_logprobs(logprobs)
    metrics = {"loss:sum": loss, "tokens:sum": float(output.num_tokens)}
    for name, number in output.metrics.items():
        metrics[f"{name}:{'max' if name.endswith('_max') else 'mean'}"] = number
    return Answer(content=wire.outputs_message(logprobs, metrics), protobuf=True)


async def _stepped(answering: Awaitable) -> Answer:
    output = await answering
    metrics = {
        "grad_norm:mean": output.grad_norm,
        "learning_rate:mean": output.lr,
        "skipped:sum": float(output.skipped),
    }
    return json_answer({"metrics": {name: _number(value) for name, value in metrics.items()}, "type": "optim_step"})


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if abs(value) < float("inf") else None


def json_answer(content: dict) -> Answer:
    return Answer(content=json.dumps(content, allow_nan=False).encode())


async def _ready(answer: Answer) -> Answer:
    return answer


async def _then(awaitable: Awaitable, content: dict) -> Answer:
    await awaitable
    return json_answer(content)


def _quietly(future: asyncio.Future) -> None:
    """For a call whose failure the next call meets too."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())

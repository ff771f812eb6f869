"""What clients ask of a model: gradients, steps, checkpoints, weights to sample from."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch

from torchtitan_rl.serve.tinker import loss_requests, wire
from torchtitan_rl.serve.tinker.bodies import (
    LoadWeightsBody,
    OptimStepBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
)
from torchtitan_rl.serve.tinker.faults import fault_of, user
from torchtitan_rl.serve.tinker.futures import Futures, ReadyBody
from torchtitan_rl.serve.tinker.models import Model, Models, json_answer, quietly, ready
from torchtitan_rl.serve.tinker.samplers import Versions
from torchtitan_rl.serve.tinker.saved_states import ModelRecord, require_intact
from torchtitan_rl.types import Datum, OptimParams
from torchtitan_rl.weights import checkpoint as run_checkpoint

__all__ = ["ModelRequests"]

logger = logging.getLogger(__name__)


class ModelRequests:
    """Each method queues a request at its place in the order of its model, and returns the id of its future."""

    def __init__(self, models: Models, versions: Versions, futures: Futures) -> None:
        self._models, self._versions, self._futures = models, versions, futures
        self._trainer, self._checkpoints = models.trainer, models.checkpoints
        self._saving = models.places.saving
        self._names_in_use: set[Path] = set()
        """Directories of sampler weights that are being saved."""

    def create_from(self, body: LoadWeightsBody) -> str:
        """A new model with the weights of a checkpoint. Returns the id of the future."""
        model_id = f"{body.session_id}:train:{body.model_seq_id}"
        request_id = f"create/{model_id}"
        if request_id in self._futures:
            return request_id
        try:
            checkpoint, directory = self._checkpoints.find(body.path, "weights")
            saved = checkpoint.model
            record = ModelRecord(
                model_id=model_id,
                base_model=body.base_model or saved.base_model,
                lora_rank=saved.lora_rank,
                train_attn=saved.train_attn,
                train_mlp=saved.train_mlp,
                user_metadata=body.user_metadata,
            )
            if saved.lora_rank or self._models.lora is not None:
                record = self._models.accepted(record)
            model = self._models.new(record, str(body.session_id))
            added = self._models.add(model, 0)
        except Exception as error:
            return self._futures.refuse(fault_of(error))
        self._futures.start(request_id, self._added_and_loaded(added, model, directory, body.optimizer))
        return request_id

    async def _added_and_loaded(self, added: Awaitable, model: Model, directory: Path, optimizer: bool) -> ReadyBody:
        try:
            await added
            await require_intact(directory)
            if self._models.live.get(model.model_id) is not model:  # another model may have its place by now
                raise user(f"model_id={model.model_id!r}: was unloaded while its state was read; make a new client")
            return await self._load(model, directory, optimizer)
        except Exception:
            if self._models.live.get(model.model_id) is model:  # it had a place
                self._models.remove(model, "its checkpoint could not be loaded")
            raise

    def train(self, request: wire.Training) -> str:
        """A forward pass, with a backward pass unless `forward_only`."""

        async def start(model: Model) -> Awaitable[ReadyBody]:
            loss, arguments = loss_requests.loss_of(request.loss_fn, request.loss_config)
            sent = loss_requests.datums(request.data, request.loss_fn, loss, vocab_size=self._models.vocab_size)
            data = loss_requests.widened(sent)
            self._models.use(model)
            if request.forward_only:
                output = self._trainer.forward(data, temperature=1.0)
                return _outputs(output, sent, lambda rows: loss_requests.value(loss, arguments, data, rows))
            output = self._trainer.forward_backward(data, loss.function, loss_config=arguments, temperature=1.0)
            return _outputs(output, sent, None)

        return self._models.submit(request.model_id, request.seq_id, start, nbytes=request.nbytes)

    def step(self, body: OptimStepBody) -> str:
        """An optimizer step."""
        adam = body.optim_params

        async def start(model: Model) -> Awaitable[ReadyBody]:
            if adam.type != "adamw":
                raise user(f"optim_params.type={adam.type[:40]!r}: is not offered; use AdamParams")
            self._models.use(model)
            if self._models.lora is not None and len(model.record.parts) < 2:
                quietly(self._trainer.freeze_untrained())
            params = OptimParams(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
                max_grad_norm=adam.grad_clip_norm if adam.grad_clip_norm > 0 else float("inf"),
            )
            return _stepped(self._trainer.optim_step(params))

        return self._models.submit(body.model_id, body.seq_id, start)

    def save(self, body: SaveWeightsBody) -> str:
        """A checkpoint to train on, with the optimizer's state."""

        async def start(model: Model) -> Awaitable[ReadyBody]:
            name = body.path or f"seq-{body.seq_id or 0:06d}"
            await self._saving.acquire()
            try:
                writing = self._checkpoints.begin(model.record, "weights", name, overwrite=body.overwrite)
                with self._checkpoints.deleted_on_error(writing):
                    await self._save_adapter(model, writing)
                    self._models.use(model)
                    staging = asyncio.ensure_future(self._trainer.stage_checkpoint(writing))
            except BaseException:
                self._saving.release()
                raise
            try:
                with self._checkpoints.deleted_on_error(writing):
                    await asyncio.shield(staging)
            except asyncio.CancelledError:  # the model is unloaded, and the trainer writes on
                self._releasing = asyncio.ensure_future(self._release_once_written(staging))
                raise
            except BaseException:
                self._saving.release()
                raise
            return self._written(model, writing, name, body)

        return self._models.submit(body.model_id, body.seq_id, start)

    async def _release_once_written(self, staging: asyncio.Future) -> None:
        try:
            await staging
            await self._trainer.checkpoint_written()
        except Exception as error:  # nobody waits for this checkpoint any more
            logger.warning("the checkpoint of a model that was unloaded could not be written: %s", error)
        finally:
            self._saving.release()

    async def _written(self, model: Model, writing: Path, name: str, body: SaveWeightsBody) -> ReadyBody:
        try:
            with self._checkpoints.deleted_on_error(writing):
                files = await self._trainer.checkpoint_written()
                saved = self._checkpoints.commit(
                    model.record, "weights", name, ttl_s=body.ttl_seconds, metadata=body.user_metadata, files=files
                )
        finally:
            self._saving.release()
        return json_answer({"path": saved.path, "type": "save_weights"})

    def save_for_sampler(self, body: SaveForSamplerBody, session_of: Callable[[Model, int], dict[str, str]]) -> str:
        """Weights to sample from: with a name on disk, without one as a version of which `session_of(model, version)`
        opens a sampling session."""

        async def start(model: Model) -> Awaitable[ReadyBody]:
            if body.kind != "snapshot":
                raise user(
                    f"kind={body.kind[:40]!r}: is not offered, the weights of a sampling client stay as they were "
                    "saved; use kind='snapshot', and the sampling client of each save from then on"
                )
            if body.path is None:
                self._models.use(model)
                version = await self._versions.publish()
                answer = session_of(model, version)
                self._versions.leave(version)
                return ready(json_answer(answer | {"type": "save_weights_for_sampler"}))
            name = self._checkpoints.directory(model.record.model_id, "sampler_weights", body.path)
            if name in self._names_in_use:
                raise user(f"path={body.path[:120]!r}: is being saved; await that save, or use another name")
            writing = self._checkpoints.begin(model.record, "sampler_weights", body.path, overwrite=body.overwrite)
            self._names_in_use.add(name)
            try:
                with self._checkpoints.deleted_on_error(writing):
                    await self._save_adapter(model, writing)
                    self._models.use(model)
                    version = await self._versions.publish()
            except BaseException:
                self._names_in_use.discard(name)
                raise
            return self._named(model, version, writing, name, body)

        return self._models.submit(body.model_id, body.seq_id, start)

    async def _named(
        self, model: Model, version: int, writing: Path, name: Path, body: SaveForSamplerBody
    ) -> ReadyBody:
        """Writes a published version under its name. Samplers read it from the disk, so the store drops it, unless a
        sampling session without a name has this version too."""
        try:
            with self._checkpoints.deleted_on_error(writing):
                await self._versions.save(version, writing / "weights.safetensors")
                saved = self._checkpoints.commit(
                    model.record,
                    "sampler_weights",
                    str(body.path),
                    ttl_s=body.ttl_seconds,
                    metadata=body.user_metadata,
                    files=await asyncio.to_thread(run_checkpoint.checksums_of_all, writing),
                )
        finally:
            self._names_in_use.discard(name)
            self._versions.leave(version)
            await self._versions.forget(version)
        return json_answer({"path": saved.path, "type": "save_weights_for_sampler"})

    def save_external(self, body: SaveExternalBody) -> str:
        """Weights for other programs: with LoRA the adapter in PEFT's form, else the model in Hugging Face's."""

        async def start(model: Model) -> Awaitable[ReadyBody]:
            if body.age_encryption_recipients:
                raise user("age_encryption_recipients: is not offered; leave it out, and encrypt what was downloaded")
            writing = self._checkpoints.begin(model.record, "external_weights", body.path, overwrite=body.overwrite)
            with self._checkpoints.deleted_on_error(writing):
                self._models.use(model)
                if self._models.lora is not None:
                    await self._trainer.save_adapter(writing)
                else:
                    await self._trainer.save_hf_model(writing, **self._models.end_tokens)
                saved = self._checkpoints.commit(
                    model.record,
                    "external_weights",
                    body.path,
                    ttl_s=body.ttl_seconds,
                    metadata=body.user_metadata,
                    files=await asyncio.to_thread(run_checkpoint.checksums_of_all, writing),
                )
            answer = {"path": saved.path, "size_bytes": saved.size_bytes, "type": "save_weights_external"}
            return ready(json_answer(answer))

        return self._models.submit(body.model_id, body.seq_id, start)

    async def _save_adapter(self, model: Model, directory: Path) -> None:
        """Adds a LoRA model's adapter in PEFT's form to a checkpoint, for archives of it. The next call of the trainer
        may be another model's."""
        if self._models.lora is not None:
            self._models.use(model)
            await self._trainer.save_adapter(run_checkpoint.adapter_dir(directory))

    def load(self, body: LoadWeightsBody) -> str:
        """Replaces a model's weights by a checkpoint's, and with `optimizer` its optimizer's state."""

        async def start(model: Model) -> Awaitable[ReadyBody]:
            checkpoint, directory = self._checkpoints.find(body.path, "weights")
            if checkpoint.model.lora_rank != model.record.lora_rank:
                raise user(
                    f"path={body.path[:120]!r}: has adapters of rank {checkpoint.model.lora_rank}, the model of rank "
                    f"{model.record.lora_rank}; create a training client from the checkpoint"
                )
            await require_intact(directory)
            return ready(await self._load(model, directory, body.optimizer))

        return self._models.submit(str(body.model_id), body.seq_id, start)

    async def _load(self, model: Model, directory: Path, optimizer: bool) -> ReadyBody:
        self._models.use(model)
        version = self._models.places.next_versions()  # the weights are others: no known version may be theirs
        # Without its state the protocol's optimizer begins anew. Nothing is awaited until both calls are submitted.
        reset = None if optimizer else self._trainer.reset_optimizer()
        await self._trainer.load_checkpoint(directory, policy_version=version, optimizer=optimizer)
        if reset is not None:
            await reset
        return json_answer({"path": str(directory.name), "type": "load_weights"})


async def _outputs(
    answering: Awaitable, data: list[Datum], loss_of_rows: Callable[[list[torch.Tensor]], float] | None
) -> ReadyBody:
    output = await answering
    loss = output.loss if loss_of_rows is None else loss_of_rows(output.policy_logprobs)
    logprobs = loss_requests.narrowed(output.policy_logprobs, data)
    metrics = {"loss:sum": loss, "tokens:sum": float(output.num_tokens)}
    for name, number in output.metrics.items():
        metrics[f"{name}:{'max' if name.endswith('_max') else 'mean'}"] = number
    return ReadyBody(content=wire.outputs_message(logprobs, metrics), kind="outputs")


async def _stepped(answering: Awaitable) -> ReadyBody:
    output = await answering
    metrics = {
        "grad_norm:mean": output.grad_norm,
        "learning_rate:mean": output.lr,
        "skipped:sum": float(output.skipped),
    }
    # JSON has no NaN, and the SDK takes numbers alone: a metric that is none is left out.
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return json_answer({"metrics": finite, "type": "optim_step"})

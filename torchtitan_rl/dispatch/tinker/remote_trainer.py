"""The policy's training client over a remote service. The service packs and batches; versions are counted here."""

from __future__ import annotations

import asyncio
import json
import re
import time
import warnings
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.microbatches import check_alike, check_lengths
from torchtitan_rl.dispatch.role_mesh import describe
from torchtitan_rl.dispatch.tinker import loss_terms
from torchtitan_rl.dispatch.tinker.call_order import CallOrder, done
from torchtitan_rl.dispatch.tinker.session import Samplers, answered, not_offered, sdk
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.types import (
    Datum,
    ForwardBackwardOutput,
    LossFunction,
    OptimParams,
    OptimStepOutput,
    mean_metrics,
    num_trained,
)
from torchtitan_rl.weights import checkpoint
from torchtitan_rl.weights.layout import Manifest
from torchtitan_rl.weights.pieces import AnyManifest

__all__ = ["RECORD", "RemoteTrainingClient"]

RECORD = "remote.json"
"""The file of a checkpoint that has the path of its weights at the service."""

_ODD = re.compile(r"[^A-Za-z0-9._-]+")

_NO_STEP = OptimParams(lr=0.0, betas=(1 - 2**-20, 1 - 2**-20), weight_decay=0.0)
"""A step that only zeroes the gradient. Moments decay by 2^-20 rather than not at all: the service has no call that
does nothing else."""


class RemoteTrainingClient(TrainingClient):
    """Scores and trains one model of a remote service. Checkpoints stay at the service: a checkpoint's directory has
    their path.

    Calls go to the service in the order they were made. A loss that the service does not know takes two requests, and
    later calls wait until the second one is sent.
    """

    def __init__(self, client: Any, rest: Any, samplers: Samplers, config: RunConfig) -> None:
        """`client` and `rest` are the SDK's TrainingClient and RestClient. `config` is settled."""
        self._client, self._rest, self._samplers, self._config = client, rest, samplers, config
        self._max_datum_tokens, self._temperature = config.trainer.training.seq_len, config.algorithm.temperature
        self._timeout_s = config.controller.call_timeout_s
        self._order = CallOrder()
        self._version: asyncio.Future[int] = done(0)
        """The version after every step that has been sent."""
        self._not_finite = False
        """Whether a gradient that is not finite was not sent, so that the next step must not be taken."""
        self._saving: tuple[Path, asyncio.Future[Any]] | None = None
        """The checkpoint that is being saved, and the service's answer."""
        self._num_resets = 0

    # Gradients and steps.

    def forward_backward(
        self,
        data: list[Datum],
        loss_fn: LossFunction,
        *,
        loss_config: dict[str, float] | None = None,
        loss_weight: float = 1.0,
        temperature: float | None = None,
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """As `TrainingClient.forward_backward`. Raises ValueError for a temperature other than 1, too."""
        self._check("forward_backward", data, temperature)
        if loss_config:
            loss_fn = partial(loss_fn, **loss_config)
        began = time.time()

        async def send() -> Awaitable[ForwardBackwardOutput]:
            with _as_workers("forward_backward"):
                named = loss_terms.service_loss(loss_fn, data, loss_weight)
            if named is not None:
                return self._known(self._send(data, named), data, loss_fn, began)
            rows = await self._logprobs("forward_backward", self._send(data, _scored(data), forward_only=True))
            with _as_workers("forward_backward"):
                evaluated = loss_terms.evaluate(loss_fn, data, rows, weight=loss_weight)
            if not all(torch.isfinite(row).all() for row in evaluated.gradients):
                self._not_finite = True
                return done(_output_of(data, rows, evaluated, began))
            answer = self._send(data, loss_terms.linearized(data, evaluated.gradients))
            return self._linearized(answer, _output_of(data, rows, evaluated, began))

        return self._order.submit(send)

    async def _known(
        self, answer: Any, data: list[Datum], loss_fn: LossFunction, began: float
    ) -> ForwardBackwardOutput:
        rows = await self._logprobs("forward_backward", answer)
        with _as_workers("forward_backward"):
            return _output_of(data, rows, loss_terms.evaluate(loss_fn, data, rows), began)

    async def _linearized(self, answer: Any, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        await self._logprobs("forward_backward", answer)
        output.interval = output.interval[0], time.time()
        return output

    def forward(
        self,
        data: list[Datum],
        *,
        temperature: float | None = None,
        top_k: int = 0,
        hidden: bool = False,
        entropy: bool = False,
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Log-probabilities of the data's targets. Raises ValueError as `forward_backward` does, and for `top_k`,
        `hidden` and `entropy`."""
        self._check("forward", data, temperature)
        if top_k or hidden or entropy:
            raise ValueError(
                f"forward.top_k={top_k}, hidden={hidden}, entropy={entropy}: a remote service answers log-"
                "probabilities of the targets alone; give several targets a token, ask the generator's score_top, or "
                "use backend='actors'"
            )
        began = time.time()

        async def send() -> Awaitable[ForwardBackwardOutput]:
            answer = self._send(data, _scored(data), forward_only=True)

            async def computed() -> ForwardBackwardOutput:
                rows = await self._logprobs("forward", answer)
                return _output_of(data, rows, loss_terms.EvaluatedLoss(loss=0.0, sums={}), began)

            return computed()

        return self._order.submit(send)

    def optim_step(
        self, params: OptimParams | None = None, *, grad_scale: float = 1.0
    ) -> asyncio.Future[OptimStepOutput]:
        """Clips the accumulated gradient, takes one step and zeroes the gradient. Raises ValueError for a `grad_scale`
        other than 1."""
        if grad_scale != 1.0:
            raise ValueError(
                f"optim_step.grad_scale={grad_scale}: a remote service steps on the gradient as it is; scale with "
                "forward_backward's loss_weight"
            )

        async def send() -> Awaitable[OptimStepOutput]:
            chosen, skip = params or OptimParams(), self._not_finite
            self._not_finite = False
            future = self._client.optim_step(self._adam(_NO_STEP if skip else chosen))
            lr = self._config.trainer.optimizer.lr if chosen.lr is None else chosen.lr
            step = asyncio.ensure_future(self._stepped(future, lr, self._version, skip))
            self._version = asyncio.ensure_future(_version_after(step, self._version))
            return step

        return self._order.submit(send)

    async def _stepped(self, future: Any, lr: float, before: asyncio.Future[int], skip: bool) -> OptimStepOutput:
        metrics = (await self._answered("optim_step", future)).metrics or {}
        skip = skip or bool(metrics.get("skipped:sum"))
        norm = metrics.get("grad_norm:mean")
        return OptimStepOutput(
            grad_norm=float("nan") if skip or norm is None else norm,
            lr=lr,
            policy_version=await asyncio.shield(before) + (not skip),
            skipped=skip,
        )

    def reset_optimizer(self) -> asyncio.Future[None]:
        """Forgets the optimizer's moments and step count: the protocol has no call for it, but weights that are saved
        and loaded without the optimizer begin anew."""
        self._num_resets += 1
        name = f"reset-{self._num_resets}"

        async def send() -> Awaitable[None]:
            saved = await self._answered("reset_optimizer", self._client.save_state(name, overwrite=True))
            return self._reset(self._load(saved.path, optimizer=False), saved.path)

        return self._order.submit(send)

    async def _reset(self, loading: Any, remote: str) -> None:
        await self._answered("reset_optimizer", loading)
        await self._delete(remote)

    def _adam(self, params: OptimParams) -> Any:
        optimizer = self._config.trainer.optimizer
        beta1, beta2 = params.betas or optimizer.betas
        limit = self._config.trainer.training.max_norm if params.max_grad_norm is None else params.max_grad_norm
        return sdk().AdamParams(
            learning_rate=optimizer.lr if params.lr is None else params.lr,
            beta1=beta1,
            beta2=beta2,
            eps=optimizer.eps if params.eps is None else params.eps,
            weight_decay=optimizer.weight_decay if params.weight_decay is None else params.weight_decay,
            grad_clip_norm=limit if limit and limit < float("inf") else 0.0,  # 0 is no clipping there
        )

    def _check(self, operation: str, data: list[Datum], temperature: float | None) -> None:
        temperature = self._temperature if temperature is None else temperature
        if temperature != 1.0:
            raise ValueError(
                f"{operation}.temperature={temperature}: a remote service computes log-probabilities at temperature 1; "
                "use 1, or backend='actors'"
            )
        check_lengths(operation, data, self._max_datum_tokens)
        check_alike(data, f"{operation}.data")

    def _send(self, data: list[Datum], loss: loss_terms.ServiceLoss, *, forward_only: bool = False) -> Any:
        """Sends a call; the SDK's future of its answer."""
        tinker = sdk()
        datums = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(datum.tokens.tolist()),
                loss_fn_inputs={name: tinker.TensorData.from_torch(rows) for name, rows in inputs.items()},
            )
            for datum, inputs in zip(data, loss.inputs, strict=True)
        ]
        call = self._client.forward if forward_only else self._client.forward_backward
        return call(datums, loss.name, loss.config or None)

    async def _logprobs(self, operation: str, answer: Any) -> list[torch.Tensor]:
        """Per datum, float32 in the targets' shape."""
        output = await self._answered(operation, answer)
        return [datum_output["logprobs"].to_torch().float() for datum_output in output.loss_fn_outputs]

    # Versions.

    def push_weights(
        self, dtype: torch.dtype, transport: str, verify: bool, adapters_apart: bool = False
    ) -> asyncio.Future[AnyManifest]:
        """Makes the present weights a version to sample from, and returns a manifest without tensors. The service
        chooses dtype and transport, and whether it merges adapters."""

        async def send() -> Awaitable[AnyManifest]:
            return self._published(self._client.save_weights_and_get_sampling_client(), self._version)

        return self._order.submit(send)

    async def _published(self, future: Any, version: asyncio.Future[int]) -> AnyManifest:
        client = await self._answered("push_weights", future)
        number = await asyncio.shield(version)
        self._samplers.add(number, client)
        return Manifest(version=number, entries={}, nbytes=0)

    async def discard_weights(self, version: int | str) -> None:
        """Does nothing: `Samplers.discard` has forgotten the version."""

    # Checkpoints.

    async def stage_checkpoint(self, path: Path) -> None:
        """Begins to save weights and optimizer at the service. Training may go on at once: the service saves at the
        call's place in the order."""

        async def send() -> Awaitable[None]:
            name = _ODD.sub("-", path.name.removesuffix(".writing"))
            future = self._client.save_state(name, overwrite=True)
            self._saving = path, asyncio.ensure_future(self._answered("stage_checkpoint", future))
            return done(None)

        await self._order.submit(send)

    async def checkpoint_written(self) -> dict[str, list]:
        """Waits until the staged checkpoint is saved. Returns the checksum of the file that says where."""
        if self._saving is None:
            raise RuntimeError("policy-0.checkpoint_written: no checkpoint is staged; call stage_checkpoint first")
        (path, saving), self._saving = self._saving, None
        saved = await saving
        path.mkdir(parents=True, exist_ok=True)
        checkpoint.write_json(path / RECORD, {"path": saved.path})
        return checkpoint.checksums(path, [path / RECORD])

    async def load_checkpoint(self, path: Path, *, policy_version: int = 0, optimizer: bool = True) -> None:
        """Loads what a checkpoint's directory names; with `optimizer=False` the weights alone, and the optimizer's
        state is forgotten."""
        remote = _remote_path(path)

        async def send() -> Awaitable[None]:
            self._version, self._not_finite = done(policy_version), False  # the gradient is forgotten with all else
            return self._answered("load_checkpoint", self._load(remote, optimizer=optimizer))

        await self._order.submit(send)

    async def init_model(self, path: Path) -> None:
        """Loads the weights of a checkpoint that this backend wrote, and forgets the optimizer's state."""
        await self.load_checkpoint(path, optimizer=False)

    async def remove_checkpoint(self, path: Path) -> None:
        """Deletes a checkpoint at the service and its directory here."""
        await self._delete(_remote_path(path))
        checkpoint.remove(path)

    async def _delete(self, remote: str) -> None:
        await self._answered("remove_checkpoint", self._rest.delete_checkpoint_from_tinker_path(remote))

    def _load(self, remote: str, *, optimizer: bool) -> Any:
        with warnings.catch_warnings():  # see session._not_on_loading
            warnings.simplefilter("ignore", FutureWarning)
            return self._client.load_state_with_optimizer(remote) if optimizer else self._client.load_state(remote)

    # What the protocol does not have.

    def begin_model(self, policy_version: int) -> asyncio.Future[None]:
        not_offered("begin_model")

    def add_adapter(
        self, name: str, *, lora_rank: int, seed: int, parts: tuple[str, ...], policy_version: int
    ) -> asyncio.Future[None]:
        not_offered("add_adapter")

    def use_adapter(self, name: str) -> asyncio.Future[None]:
        not_offered("use_adapter")

    def drop_adapter(self, name: str) -> asyncio.Future[None]:
        not_offered("drop_adapter")

    def freeze_untrained(self) -> asyncio.Future[None]:
        not_offered("freeze_untrained")

    async def push_copy(self, transport: str) -> None:
        not_offered("push_copy")

    async def pull_copy(self) -> None:
        not_offered("pull_copy")

    async def push_head(self, transport: str) -> None:
        not_offered("push_head")

    async def pull_head(self) -> None:
        not_offered("pull_head")

    async def save_hf_model(self, path: Path, *, eos: int, pad: int) -> None:
        not_offered("save_hf_model")

    async def save_adapter(self, path: Path) -> None:
        not_offered("save_adapter")

    async def parameters(self) -> dict[str, torch.Tensor]:
        not_offered("parameters")

    async def gradients(self) -> dict[str, torch.Tensor | None]:
        not_offered("gradients")

    async def moments(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        not_offered("moments")

    async def residency(self) -> list[dict[str, int]]:
        not_offered("residency")

    async def profile(self, role: str, rank: int, file: str) -> None:
        not_offered("profile")

    # How a call is answered.

    async def _answered(self, operation: str, future: Any) -> Any:
        try:
            return await answered(future, f"policy-0.{operation}", self._timeout_s)
        except ValueError as error:  # the client has checked the call: what is wrong now is no argument of the caller's
            raise RuntimeError(str(error)) from error


class _as_workers:  # noqa: N801
    """Raises an exception of the block as a worker's: RuntimeError with the operation and the exception's name."""

    def __init__(self, operation: str) -> None:
        self._operation = operation

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            raise RuntimeError(f"policy-0.{self._operation}: {describe(error)}") from error


def _scored(data: list[Datum]) -> loss_terms.ServiceLoss:
    """A forward pass: the cross-entropy with weights of 1, of which only the log-probabilities are read."""
    inputs = [{"target_tokens": d.target_tokens, "weights": torch.ones(d.target_tokens.shape)} for d in data]
    return loss_terms.ServiceLoss(name="cross_entropy", inputs=inputs)


def _output_of(
    data: list[Datum], rows: list[torch.Tensor], evaluated: loss_terms.EvaluatedLoss, began: float
) -> ForwardBackwardOutput:
    num_tokens = num_trained(data)
    return ForwardBackwardOutput(
        policy_logprobs=rows,
        values=[],
        loss=evaluated.loss,
        num_tokens=num_tokens,
        metrics=mean_metrics(evaluated.sums, num_tokens),
        interval=(began, time.time()),
    )


async def _version_after(step: asyncio.Future[OptimStepOutput], before: asyncio.Future[int]) -> int:
    """The version once a step has been taken; the one before if the step failed."""
    try:
        return (await asyncio.shield(step)).policy_version
    except (Exception, asyncio.CancelledError):
        return await asyncio.shield(before)


def _remote_path(path: Path) -> str:
    """Raises ValueError for a directory without the path of its weights at a service."""
    try:
        return json.loads((path / RECORD).read_text())["path"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"checkpoint={str(path)!r}: has no {RECORD} that names weights at a service ({error}); another backend "
            "wrote it: resume with that one"
        ) from error

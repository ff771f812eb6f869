"""What a step asks of a remote service: gradients, an optimizer step, a version to sample from. The service packs and
batches; versions are counted here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from functools import partial
from typing import Any

import torch

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.microbatches import check_alike, check_lengths
from torchtitan_rl.dispatch.role_mesh import describe
from torchtitan_rl.dispatch.tinker import loss_terms
from torchtitan_rl.dispatch.tinker.call_order import InOrder, done
from torchtitan_rl.dispatch.tinker.session import NoMesh, Samplers, answered, sdk
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.types import Datum, ForwardBackwardOutput, LossFunction, OptimParams, OptimStepOutput

__all__ = ["RemoteSteps", "output_of", "scored"]

_NO_STEP = OptimParams(lr=0.0, betas=(1 - 2**-20, 1 - 2**-20), weight_decay=0.0)
"""A step that only zeroes the gradient: the moments change by a millionth."""


class RemoteSteps(TrainingClient):
    """Trains one model of a remote service; `RemoteTrainingClient` adds what a plain step does not ask.

    Calls go to the service in the order they were made. A loss that the service does not know takes two requests, and
    later calls wait until the second one is sent.
    """

    def __init__(self, client: Any, samplers: Samplers, config: RunConfig, *, vocab_size: int) -> None:
        """`client` is the SDK's TrainingClient. `config` is settled."""
        super().__init__(
            NoMesh(config.controller.call_timeout_s),  # type: ignore[arg-type]
            max_tokens_per_microbatch=config.trainer.max_tokens_per_microbatch,
            max_datum_tokens=config.trainer.training.seq_len,
            temperature=config.algorithm.temperature,
            vocab_size=vocab_size,
        )
        self._client, self._samplers, self._config = client, samplers, config
        self._timeout_s = config.controller.call_timeout_s
        self._order = InOrder()
        self._version: asyncio.Future[int] = done(0)
        """The version after every step that has been sent."""
        self._not_finite = False
        """Whether a gradient that is not finite was not sent, so that the next step must not be taken."""

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
                said = loss_terms.named(loss_fn, data, loss_weight)
            if said is not None:
                return self._known(self._sent(data, said), data, loss_fn, began)
            rows = await self._logprobs("forward_backward", self._sent(data, scored(data), forward_only=True))
            with _as_workers("forward_backward"):
                found = loss_terms.evaluate(loss_fn, data, rows, weight=loss_weight)
            if not all(torch.isfinite(row).all() for row in found.gradients):
                self._not_finite = True
                return done(output_of(data, rows, found, began))
            answer = self._sent(data, loss_terms.linearized(data, found.gradients))
            return self._linearized(answer, output_of(data, rows, found, began))

        return self._order.submit(send)

    async def _known(
        self, answer: Any, data: list[Datum], loss_fn: LossFunction, began: float
    ) -> ForwardBackwardOutput:
        rows = await self._logprobs("forward_backward", answer)
        with _as_workers("forward_backward"):
            return output_of(data, rows, loss_terms.evaluate(loss_fn, data, rows), began)

    async def _linearized(self, answer: Any, output: ForwardBackwardOutput) -> ForwardBackwardOutput:
        await self._logprobs("forward_backward", answer)
        output.interval = output.interval[0], time.time()
        return output

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
            given, skip = params or OptimParams(), self._not_finite
            self._not_finite = False
            future = self._client.optim_step(self._adam(_NO_STEP if skip else given))
            lr = self._config.trainer.optimizer.lr if given.lr is None else given.lr
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

    def _sent(self, data: list[Datum], said: loss_terms.Named, *, forward_only: bool = False) -> Any:
        """Sends a call; the SDK's future of its answer."""
        tinker = sdk()
        datums = [
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(datum.tokens.tolist()),
                loss_fn_inputs={name: tinker.TensorData.from_torch(rows) for name, rows in inputs.items()},
            )
            for datum, inputs in zip(data, said.inputs, strict=True)
        ]
        call = self._client.forward if forward_only else self._client.forward_backward
        return call(datums, said.name, said.config or None)

    async def _logprobs(self, operation: str, answer: Any) -> list[torch.Tensor]:
        """Per datum, float32 in the targets' shape."""
        output = await self._answered(operation, answer)
        return [of_datum["logprobs"].to_torch().float() for of_datum in output.loss_fn_outputs]

    # Versions.

    async def push_weights(self, dtype: torch.dtype, transport: str, verify: bool) -> int:
        """Makes the present weights a version to sample from, and returns its number. The service chooses dtype and
        transport."""

        async def send() -> Awaitable[int]:
            return self._published(self._client.save_weights_and_get_sampling_client(), self._version)

        return await self._order.submit(send)

    async def _published(self, future: Any, version: asyncio.Future[int]) -> int:
        client = await self._answered("push_weights", future)
        number = await asyncio.shield(version)
        self._samplers.add(number, client)
        return number

    async def discard_weights(self, version: int | str) -> None:
        """Does nothing: `Samplers.discard` has forgotten the version."""

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


def scored(data: list[Datum]) -> loss_terms.Named:
    """A forward pass: the cross-entropy with weights of 1, of which only the log-probabilities are read."""
    inputs = [{"target_tokens": d.target_tokens, "weights": torch.ones(d.target_tokens.shape)} for d in data]
    return loss_terms.Named(name="cross_entropy", inputs=inputs)


def output_of(
    data: list[Datum], rows: list[torch.Tensor], found: loss_terms.Evaluated, began: float
) -> ForwardBackwardOutput:
    masks = [datum.loss_inputs.get("loss_mask", torch.ones(len(datum))) for datum in data]
    num_tokens = sum(int((mask_T > 0).sum()) for mask_T in masks)
    return ForwardBackwardOutput(
        policy_logprobs=rows,
        values=[],
        loss=found.loss,
        num_tokens=num_tokens,
        metrics={n: v if n.endswith("_max") else v / max(1, num_tokens) for n, v in found.sums.items()},
        interval=(began, time.time()),
    )


async def _version_after(step: asyncio.Future[OptimStepOutput], before: asyncio.Future[int]) -> int:
    """The version once a step has been taken; the one before if the step failed."""
    try:
        return (await asyncio.shield(step)).policy_version
    except (Exception, asyncio.CancelledError):
        return await asyncio.shield(before)

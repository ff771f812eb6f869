"""What a step asks of a trainer role: gradients, an optimizer step, a publication. Layers above see no rank, no
data-parallel size, no microbatch and no filler row."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from functools import partial

import torch

from torchtitan_rl.dispatch.microbatches import check_alike, filler, pack, plan_microbatches
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.role_mesh import RoleMesh
from torchtitan_rl.types import Accumulated, Datum, ForwardBackwardOutput, LossFunction, OptimParams, OptimStepOutput

__all__ = ["TrainingSteps"]


class TrainingSteps:
    """Trains one model that lives on a mesh. `TrainingClient` adds the calls that a plain step does not make."""

    def __init__(
        self,
        mesh: RoleMesh,
        *,
        max_tokens_per_microbatch: int,
        max_datum_tokens: int,
        temperature: float,
        vocab_size: int,
        placement: Placement | None = None,
    ):
        """`placement` gives the role its turns on shared devices; None: no role shares devices."""
        self._mesh, self._placement = mesh, placement
        self._max_tokens, self._max_datum_tokens = max_tokens_per_microbatch, max_datum_tokens
        self._temperature, self._vocab_size = temperature, vocab_size

    def forward_backward(
        self,
        data: list[Datum],
        loss_fn: LossFunction,
        *,
        loss_config: dict[str, float] | None = None,
        loss_weight: float = 1.0,
        temperature: float | None = None,
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Adds the gradient of `loss_weight` x the summed loss of the data. Gradients accumulate over calls.

        `loss_config` holds keyword arguments of the loss. `temperature` divides the logits; its default is the run's
        sampling temperature. Raises ValueError for an empty list, for a datum longer than the trainer's context, and
        for datums that differ in their loss inputs or in their number of targets per token.
        """
        if loss_config:
            loss_fn = partial(loss_fn, **loss_config)
        temperature = self._temperature if temperature is None else temperature
        return self._submit("forward_backward", data, data, loss_fn, temperature, loss_weight)

    def _submit(
        self, endpoint: str, data: list[Datum], sent: list[Datum], *args
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Sends the datums of `sent`, which are those of `data` or parts of them, packed and split over the ranks."""
        if not data:
            raise ValueError(f"{endpoint}.data=[]: no datums; skip the call when nothing is left to train on")
        for index, datum in enumerate(data):
            if len(datum) > self._max_datum_tokens:
                raise ValueError(
                    f"{endpoint}.data[{index}]: {len(datum)} tokens, the trainer's context is "
                    f"trainer.training.seq_len={self._max_datum_tokens}; raise it or shorten the datum"
                )
        check_alike(data, f"{endpoint}.data")
        plan = plan_microbatches([len(d) for d in data], self._mesh.data_parallel_size, self._max_tokens)
        shards = [
            [pack([sent[i] for i in members]) if members else filler(sent[0]) for members in microbatches]
            for microbatches in plan
        ]
        answers = self._run(endpoint, lambda: self._mesh.call_split(endpoint, shards, *args))

        async def collect() -> ForwardBackwardOutput:
            return _merge(await answers, plan, data, who=f"{self._mesh.role}.{endpoint}")

        return asyncio.ensure_future(collect())

    def optim_step(
        self, params: OptimParams | None = None, *, grad_scale: float = 1.0
    ) -> asyncio.Future[OptimStepOutput]:
        """Clips `grad_scale` x the accumulated gradient, takes one optimizer step and zeroes the gradient."""
        answers = self._run(
            "optim_step", lambda: self._mesh.call_each("optim_step", params or OptimParams(), grad_scale)
        )

        async def agreed() -> OptimStepOutput:
            return _agreed(await answers, who=f"{self._mesh.role}.optim_step")

        return asyncio.ensure_future(agreed())

    async def push_weights(self, dtype: torch.dtype, transport: str, verify: bool) -> int:
        """Pushes the current policy version and returns it. `dispatch.versions.PolicyVersions.publish` calls this."""
        return await self._call("push_weights", dtype, transport, verify)

    async def discard_weights(self, version: int | str) -> None:
        await self._mesh.call_all("discard_weights", version)

    def _call(self, endpoint: str, *args) -> asyncio.Future:
        """Calls every rank. Returns the one answer; raises RuntimeError when ranks disagree."""
        return self._run(endpoint, lambda: self._mesh.call_all(endpoint, *args))

    def _run(self, operation: str, call: Callable[[], asyncio.Future]) -> asyncio.Future:
        return call() if self._placement is None else self._placement.run(self._mesh.role, operation, call)


def _agreed(answers: list[OptimStepOutput], *, who: str) -> OptimStepOutput:
    """The first rank's answer. Other ranks sum the gradient norm in another order, so its last bits may differ.

    Raises RuntimeError when norms differ by more than 1e-4, relatively, or any other field differs: the ranks no longer
    hold one model.
    """
    first = answers[0]
    for answer in answers[1:]:
        same_norm = math.isclose(answer.grad_norm, first.grad_norm, rel_tol=1e-4) or not math.isfinite(first.grad_norm)
        if not same_norm or dataclasses.replace(answer, grad_norm=0.0) != dataclasses.replace(first, grad_norm=0.0):
            raise RuntimeError(f"{who}: ranks disagree: {answers}")
    return first


def _merge(
    answers: list[Accumulated], ranks: list[list[list[int]]], data: list[Datum], *, who: str
) -> ForwardBackwardOutput:
    """Puts the rows of all ranks back into input order; sums become means over the tokens that train.

    Raises RuntimeError when a rank answers with another number of rows than its shard has.
    """
    rows: dict[str, list[torch.Tensor | None]] = {}
    sums: dict[str, float] = {}
    for rank, (answer, microbatches) in enumerate(zip(answers, ranks, strict=True)):
        slots = [index for members in microbatches for index in members or [None]]  # a filler has one row
        for name, of_rank in answer.rows.items():
            if len(slots) != len(of_rank):
                raise RuntimeError(
                    f"{who}: data-parallel rank {rank} answered with {len(of_rank)} rows for {len(slots)}"
                )
            for index, row in zip(slots, of_rank):
                if index is not None:
                    rows.setdefault(name, [None] * len(data))[index] = row
        for name, value in answer.sums.items():
            sums[name] = max(sums.get(name, value), value) if name.endswith("_max") else sums.get(name, 0.0) + value
    num_tokens = sum(
        int((d.loss_inputs["loss_mask"] > 0).sum()) if "loss_mask" in d.loss_inputs else len(d) for d in data
    )
    metrics = {n: v if n.endswith("_max") else v / max(1, num_tokens) for n, v in sums.items()}
    return ForwardBackwardOutput(
        policy_logprobs=rows.get("policy_logprobs", []),
        values=rows.get("predicted_values", []),
        top_tokens=rows.get("top_tokens", []),
        top_logprobs=rows.get("top_logprobs", []),
        hidden=rows.get("hidden", []),
        loss=sum(a.loss for a in answers),
        num_tokens=num_tokens,
        metrics=metrics,
        interval=(min(a.interval[0] for a in answers), max(a.interval[1] for a in answers)),
    )

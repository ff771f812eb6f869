"""What a step asks of a trainer role: gradients, an optimizer step, a publication. Layers above see no rank, no
data-parallel size, no microbatch and no filler row."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch

from torchtitan_rl.dispatch.microbatches import check_alike, filler, pack, plan_microbatches
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.role_mesh import RoleMesh
from torchtitan_rl.types import Accumulated, Datum, ForwardBackwardOutput, LossFunction, OptimParams, OptimStepOutput
from torchtitan_rl.types.refusals import refuse_lengths, refuse_rows
from torchtitan_rl.weights.finite import NotFinite, WeightsNotFinite

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
        if not data or max(len(datum) for datum in data) > self._max_datum_tokens:
            refuse_lengths(endpoint, [len(datum) for datum in data], self._max_datum_tokens)
        check_alike(data, f"{endpoint}.data")
        plan = plan_microbatches([len(d) for d in data], self._mesh.data_parallel_size, self._max_tokens)
        shards = [[pack([sent[i] for i in m]) if m else filler(sent[0]) for m in of_rank] for of_rank in plan]
        answers = self._run(endpoint, lambda: self._mesh.call_split(endpoint, shards, *args))

        async def collect() -> ForwardBackwardOutput:
            return _merge(await answers, plan, data, who=f"{self._mesh.role}.{endpoint}")

        return asyncio.ensure_future(collect())

    def optim_step(
        self, params: OptimParams | None = None, *, grad_scale: float = 1.0
    ) -> asyncio.Future[OptimStepOutput]:
        """Clips `grad_scale` x the accumulated gradient, takes one optimizer step and zeroes the gradient."""
        args = (params or OptimParams(), grad_scale)
        answers = self._run("optim_step", lambda: self._mesh.call_each("optim_step", *args))

        async def agreed() -> OptimStepOutput:
            return _agreed(await answers, who=f"{self._mesh.role}.optim_step")

        return asyncio.ensure_future(agreed())

    async def push_weights(self, dtype: torch.dtype, transport: str, verify: bool) -> int:
        """Pushes the current policy version and returns it. `dispatch.versions.PolicyVersions.publish` calls this.
        Raises WeightsNotFinite, and publishes nothing, for weights with a NaN or an infinity."""
        answers = await self._run(
            "push_weights", lambda: self._mesh.call_each("push_weights", dtype, transport, verify)
        )
        for answer in answers:  # the rank that publishes has looked
            if isinstance(answer, NotFinite):
                await self.discard_weights(answer.version)
                raise WeightsNotFinite(answer)
        if len(set(answers)) > 1:
            raise RuntimeError(f"{self._mesh.role}.push_weights: ranks disagree: {answers}")
        return answers[0]

    async def discard_weights(self, version: int | str) -> None:
        await self._mesh.call_all("discard_weights", version)

    def _call(self, endpoint: str, *args) -> asyncio.Future:
        """Calls every rank. Returns the one answer; raises RuntimeError when ranks disagree."""
        return self._run(endpoint, lambda: self._mesh.call_all(endpoint, *args))

    def _run(self, operation: str, call: Callable[[], asyncio.Future]) -> asyncio.Future:
        return call() if self._placement is None else self._placement.run(self._mesh.role, operation, call)


def _agreed(answers: list[OptimStepOutput], *, who: str) -> OptimStepOutput:
    """The first rank's answer. Raises RuntimeError when ranks no longer hold one model: norms differ by more than 1e-4,
    relatively, or any other field differs."""
    first = answers[0]
    if not all(_alike(answer, first) for answer in answers[1:]):
        raise RuntimeError(f"{who}: ranks disagree: {answers}")
    return first


def _alike(one: OptimStepOutput, other: OptimStepOutput) -> bool:
    # Ranks sum the gradient norm in different orders, so its last bits may differ.
    same_norm = math.isclose(one.grad_norm, other.grad_norm, rel_tol=1e-4) or not math.isfinite(other.grad_norm)
    return same_norm and dataclasses.replace(one, grad_norm=0.0) == dataclasses.replace(other, grad_norm=0.0)


def _merge(
    answers: list[Accumulated], ranks: list[list[list[int]]], data: list[Datum], *, who: str
) -> ForwardBackwardOutput:
    """Puts the rows of all ranks back into input order; sums become means over the tokens that train.

    Raises RuntimeError when a rank answers with another number of rows than its shard has.
    """
    rows: dict[str, dict[int | None, torch.Tensor]] = defaultdict(dict)  # by name, then by the datum's index
    sums: dict[str, float] = {}
    for rank, (answer, microbatches) in enumerate(zip(answers, ranks, strict=True)):
        slots = [index for members in microbatches for index in members or [None]]  # a filler has one row
        for name, of_rank in answer.rows.items():
            if len(slots) != len(of_rank):
                refuse_rows(who, rank, len(of_rank), len(slots))
            rows[name] |= zip(slots, of_rank)
        for name, value in answer.sums.items():
            sums[name] = max(sums.get(name, value), value) if name.endswith("_max") else sums.get(name, 0.0) + value
    masks = [d.loss_inputs["loss_mask"] if "loss_mask" in d.loss_inputs else torch.ones(len(d)) for d in data]
    num_tokens = int((torch.cat(masks) > 0).sum())
    lists = {name: [of_data[index] for index in range(len(data))] for name, of_data in rows.items()}
    return ForwardBackwardOutput(
        policy_logprobs=lists.pop("policy_logprobs", []),
        values=lists.pop("predicted_values", []),
        **lists,
        loss=sum(a.loss for a in answers),
        num_tokens=num_tokens,
        metrics={n: v if n.endswith("_max") else v / max(1, num_tokens) for n, v in sums.items()},
        interval=(min(a.interval[0] for a in answers), max(a.interval[1] for a in answers)),
    )

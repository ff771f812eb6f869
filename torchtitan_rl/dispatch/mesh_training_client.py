"""A trainer role on a mesh. Datums are packed into microbatches and split over ranks; answers come back in order."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from torchtitan_rl import platform
from torchtitan_rl.actors.operations import VALUE_ROLES, Operation, TrainerOperations
from torchtitan_rl.dispatch.microbatches import check_alike, check_lengths, filler, pack, plan_microbatches
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.role_mesh import RoleMesh
from torchtitan_rl.dispatch.shared_plan import PrefixCost, plan_siblings
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.record.tracing import span
from torchtitan_rl.types import (
    Datum,
    ForwardBackwardOutput,
    LossFunction,
    Microbatch,
    OptimParams,
    OptimStepOutput,
    RankOutput,
    add_sum,
    mean_metrics,
    num_trained,
)
from torchtitan_rl.weights.finite import NotFinite, WeightsNotFinite
from torchtitan_rl.weights.pieces import AnyManifest

__all__ = ["MeshTrainingClient"]

_FILLER = None  # in place of a datum's index, of the one row of a microbatch that a rank without datums computes
_POLL_S, _LONGEST_POLL_S = 0.02, 0.5  # pauses between questions whether a checkpoint is on disk


class MeshTrainingClient(TrainingClient):
    """Scores and trains one model that lives on a mesh: ranks that are actors of this run, or objects in this process.
    `TrainingClient` says what each method promises."""

    def __init__(
        self,
        mesh: RoleMesh,
        *,
        max_tokens_per_microbatch: int,
        max_datum_tokens: int,
        temperature: float,
        vocab_size: int,
        placement: Placement | None = None,
        prefix_cost: PrefixCost | None = None,
    ):
        """`max_tokens_per_microbatch`: see `TrainerConfig`. `placement` gives the role its turns on shared devices;
        None: no role shares devices. `prefix_cost` chooses the siblings that compute their prompt together; None: every
        datum is computed whole."""
        self._mesh, self._placement = mesh, placement
        self._max_tokens = platform.microbatch_tokens(max_tokens_per_microbatch)
        self._max_datum_tokens = max_datum_tokens
        self._temperature, self._vocab_size = temperature, vocab_size
        self._prefix_cost = prefix_cost

    def forward_backward(
        self,
        data: list[Datum],
        loss_fn: LossFunction,
        *,
        loss_config: dict[str, float] | None = None,
        loss_weight: float = 1.0,
        temperature: float | None = None,
    ) -> asyncio.Future[ForwardBackwardOutput]:
        if loss_config:
            loss_fn = partial(loss_fn, **loss_config)
        temperature = self._temperature if temperature is None else temperature
        return self._submit(TrainerOperations.forward_backward, data, loss_fn, temperature, loss_weight)

    def optim_step(
        self, params: OptimParams | None = None, *, grad_scale: float = 1.0
    ) -> asyncio.Future[OptimStepOutput]:
        args = (params or OptimParams(), grad_scale)
        answers = self._run(
            TrainerOperations.optim_step, lambda: self._mesh.call_each(TrainerOperations.optim_step, *args)
        )

        async def agreed() -> OptimStepOutput:
            return _agreed(await answers, who=f"{self._mesh.role}.optim_step")

        return asyncio.ensure_future(agreed())

    def forward(
        self,
        data: list[Datum],
        *,
        temperature: float | None = None,
        top_k: int = 0,
        hidden: bool = False,
        entropy: bool = False,
    ) -> asyncio.Future[ForwardBackwardOutput]:
        if not 0 <= top_k <= self._vocab_size:
            raise ValueError(
                f"forward.top_k={top_k}: must be between 1 and the vocabulary's {self._vocab_size}; use 0 for none"
            )
        if (top_k or hidden or entropy) and self._mesh.role in VALUE_ROLES:
            raise ValueError(
                f"forward: role={self._mesh.role!r} has a value head, neither tokens nor states to learn from; ask "
                "another role for top_k, hidden or entropy"
            )
        temperature = self._temperature if temperature is None else temperature
        # No loss input is read, and hidden states are large.
        bare = [dataclasses.replace(datum, loss_inputs={}) for datum in data]
        return self._submit(TrainerOperations.forward, data, temperature, top_k, hidden, entropy, sent=bare)

    def reset_optimizer(self) -> asyncio.Future[None]:
        return self._call(TrainerOperations.reset_optimizer)

    def begin_model(self, policy_version: int) -> asyncio.Future[None]:
        return self._call(TrainerOperations.begin_model, policy_version)

    def add_adapter(
        self, name: str, *, lora_rank: int, seed: int, parts: tuple[str, ...], policy_version: int
    ) -> asyncio.Future[None]:
        return self._call(TrainerOperations.add_adapter, name, lora_rank, seed, parts, policy_version)

    def use_adapter(self, name: str) -> asyncio.Future[None]:
        return self._call(TrainerOperations.use_adapter, name)

    def drop_adapter(self, name: str) -> asyncio.Future[None]:
        return self._call(TrainerOperations.drop_adapter, name)

    def freeze_untrained(self) -> asyncio.Future[None]:
        return self._call(TrainerOperations.freeze_untrained)

    def push_weights(
        self, dtype: torch.dtype, transport: str, verify: bool, adapters_apart: bool = False
    ) -> asyncio.Future[AnyManifest]:
        pushing = self._on_each(TrainerOperations.push_weights, dtype, transport, verify, adapters_apart)

        async def pushed() -> AnyManifest:
            written, *numbers = await pushing
            if isinstance(written, NotFinite):
                await self.discard_weights(written.version)
                raise WeightsNotFinite(written)
            if any(number != written.version for number in numbers):
                versions = [written.version, *numbers]
                raise RuntimeError(f"{self._mesh.role}.push_weights: ranks disagree: {versions}")
            return written

        return asyncio.ensure_future(pushed())

    async def discard_weights(self, version: int | str) -> None:
        await self._mesh.call_all(TrainerOperations.discard_weights, version)

    async def push_copy(self, transport: str) -> None:
        await self._call(TrainerOperations.push_copy, transport)

    async def pull_copy(self) -> None:
        await self._call(TrainerOperations.pull_copy)

    async def push_head(self, transport: str) -> None:
        await self._call(TrainerOperations.push_head, transport)

    async def pull_head(self) -> None:
        await self._call(TrainerOperations.pull_head)

    async def init_model(self, path: Path) -> None:
        await self._call(TrainerOperations.init_model, str(path))

    async def stage_checkpoint(self, path: Path) -> None:
        """One shard per rank, in parallel."""
        await self._call(TrainerOperations.stage_checkpoint, str(path))

    async def checkpoint_written(self) -> dict[str, list]:
        end = time.monotonic() + self._mesh.timeout_s
        pause_s = _POLL_S
        # On shared devices it waits for no turn, which would put the generators to sleep for a look at a file.
        while None in (written := await self._mesh.call_each(TrainerOperations.checkpoint_written)):
            if time.monotonic() > end:
                raise RuntimeError(
                    f"{self._mesh.role}.checkpoint_written: not on disk after {self._mesh.timeout_s:g} s; use a faster "
                    "file system, or raise controller.call_timeout_s"
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        return {name: entry for entries in written for name, entry in entries.items()}

    async def remove_checkpoint(self, path: Path) -> None:
        await self._mesh.call_all(TrainerOperations.remove_checkpoint, str(path))

    async def load_checkpoint(self, path: Path, *, policy_version: int = 0, optimizer: bool = True) -> None:
        await self._call(
            TrainerOperations.load_checkpoint if optimizer else TrainerOperations.load_weights,
            str(path),
            policy_version,
        )

    async def save_hf_model(self, path: Path, *, eos: int, pad: int) -> None:
        await self._call(TrainerOperations.save_hf_model, str(path), eos, pad)

    async def save_adapter(self, path: Path) -> None:
        await self._call(TrainerOperations.save_adapter, str(path))

    async def parameters(self) -> dict[str, torch.Tensor]:
        return (await self._on_each(TrainerOperations.parameters))[0]

    async def gradients(self) -> dict[str, torch.Tensor | None]:
        return (await self._on_each(TrainerOperations.gradients))[0]

    async def moments(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return (await self._on_each(TrainerOperations.moments))[0]

    async def residency(self) -> list[dict[str, int]]:
        return await self._mesh.call_each(TrainerOperations.residency)

    async def profile(self, role: str, rank: int, file: str) -> None:
        assert role == self._mesh.role
        await self._mesh.call_rank(rank, TrainerOperations.profile, file)

    # How a call reaches the ranks.

    def _submit(
        self, operation: Operation, data: list[Datum], *args, sent: list[Datum] | None = None
    ) -> asyncio.Future[ForwardBackwardOutput]:
        """Packs datums and splits them over the ranks. `sent`: what travels in place of `data`, datum by datum; None:
        `data` itself."""
        sent = data if sent is None else sent
        name = operation.__name__
        check_lengths(name, data, self._max_datum_tokens)
        with span("pack microbatches"):
            check_alike(data, f"{name}.data")
            num_ranks, siblings = self._mesh.data_parallel_size, None
            if self._prefix_cost is None:
                plan = plan_microbatches([len(d) for d in data], num_ranks, self._max_tokens)
            else:
                siblings = plan_siblings(data, num_ranks, self._max_tokens, self._prefix_cost)
                plan = siblings.ranks

            def packed(members: list[int]) -> Microbatch:
                if not members:
                    return filler(sent[0])
                return pack([sent[i] for i in members], None if siblings is None else siblings.of(members))

            shards = [[packed(members) for members in microbatches] for microbatches in plan]
        answers = self._run(operation, lambda: self._mesh.call_split(operation, shards, *args))

        async def collect() -> ForwardBackwardOutput:
            rank_outputs = await answers
            with span("read the trainer's answer"):
                output = _merge(rank_outputs, plan, data, who=f"{self._mesh.role}.{name}")
                if siblings is not None:
                    output.metrics["prompt/shared_frac"] = siblings.shared_frac
                return output

        return asyncio.ensure_future(collect())

    def _call(self, operation: Operation, *args) -> asyncio.Future:
        """Calls every rank. Returns the one answer; raises RuntimeError when ranks disagree."""
        return self._run(operation, lambda: self._mesh.call_all(operation, *args))

    def _on_each(self, operation: Operation, *args) -> asyncio.Future[list]:
        """Calls every rank. Returns all answers, in rank order."""
        return self._run(operation, lambda: self._mesh.call_each(operation, *args))

    def _run(self, operation: Operation, call: Callable[[], asyncio.Future]) -> asyncio.Future:
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
    answers: list[RankOutput], plan: list[list[list[int]]], data: list[Datum], *, who: str
) -> ForwardBackwardOutput:
    """Puts the rows of all ranks back into input order; sums become means over the tokens that train.

    Raises RuntimeError when a rank answers with another number of rows than its shard has.
    """
    rows: dict[str, dict[int | None, torch.Tensor]] = defaultdict(dict)  # by name, then by the datum's index
    sums: dict[str, float] = {}
    for rank, (answer, microbatches) in enumerate(zip(answers, plan, strict=True)):
        datum_of_row = [index for members in microbatches for index in members or [_FILLER]]
        for name, rank_rows in answer.rows.items():
            if len(datum_of_row) != len(rank_rows):
                raise RuntimeError(
                    f"{who}: data-parallel rank {rank} answered with {len(rank_rows)} rows for {len(datum_of_row)}"
                )
            rows[name] |= zip(datum_of_row, rank_rows)
        for name, value in answer.sums.items():
            add_sum(sums, name, value)
    num_tokens = num_trained(data)
    outputs = {name: [by_datum[index] for index in range(len(data))] for name, by_datum in rows.items()}
    return ForwardBackwardOutput(
        policy_logprobs=outputs.pop("policy_logprobs", []),
        values=outputs.pop("predicted_values", []),
        **outputs,
        loss=sum(a.loss for a in answers),
        num_tokens=num_tokens,
        metrics=mean_metrics(sums, num_tokens),
        interval=(min(a.interval[0] for a in answers), max(a.interval[1] for a in answers)),
    )

"""The influence of each batch of a recorded run: what its optimizer steps did for the rollouts of other batches."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.record.attempts import read_rollouts
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.rollout.batches import BatchSource
from torchtitan_rl.rollout.draws import Batch
from torchtitan_rl.types import Datum

__all__ = ["Influence", "References", "WeighedBatches", "read_references", "write_influences"]

_MAX_SEQUENCES = 64
"""Sequences of a batch that the others are measured by."""
_NEIGHBOURS = 10
"""Batches on either side that say which influence is usual at this time of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Influence:
    """Of one batch."""

    step: int
    """The optimizer step with which the batch ended."""
    gain: float
    """What its own gradient changed of advantage x log-probability, nats per sampled token, in the rollouts of the
    batches around it: the median over these batches."""
    deviations: float
    """How far the gain lies from the median of the batches around it, in standard deviations by their median absolute
    deviation. Far below 0: the batch undid what the others teach."""


@dataclass(kw_only=True, slots=True)
class References:
    """Recorded training sequences of one batch."""

    data: list[Datum]
    advantages: list[torch.Tensor]
    """(T,) per datum, 0 where the policy did not sample the target."""

    async def objective(self, trainer: TrainingClient) -> float:
        """Mean of advantage x log-probability over sampled tokens, under the trainer's weights now."""
        if not self.data:
            return 0.0
        logprobs = (await trainer.forward(self.data)).policy_logprobs
        total = sum(float((a.double() * p.double()).sum()) for a, p in zip(self.advantages, logprobs, strict=True))
        return total / max(1, sum(int((a != 0).sum()) for a in self.advantages))


def read_references(run: RunDir, *, first: int, last: int) -> dict[int, References]:
    """Step -> sequences of its batch with an advantage, for the steps after `first` up to `last`, in order. Raises
    ValueError for a run that was recorded without its tokens."""
    sequences: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for record in read_rollouts(run, ("step", "attempt", "rollout_id", "sequences")):
        if first < record["step"] <= last:
            of_batch = sequences[record["step"]]
            of_batch += [sequence for sequence in record["sequences"] or () if _teaches(sequence)]
    if not any(sequences.values()):
        raise ValueError(
            f"run={str(run.path)!r}: its records have no training sequences; a run keeps them with "
            "controller.record_tokens=True, and a loss with one target a token"
        )
    return {step: _references(of_batch) for step, of_batch in sorted(sequences.items())}


def _teaches(sequence: dict[str, Any]) -> bool:
    return sequence["target_tokens"] is not None and any(sequence["advantages"] or ())


def _references(sequences: list[dict[str, Any]]) -> References:
    every = max(1, -(-len(sequences) // _MAX_SEQUENCES))
    data, advantages = [], []
    for sequence in sequences[::every]:
        tokens, targets = torch.tensor(sequence["tokens"]), torch.tensor(sequence["target_tokens"])
        data.append(Datum(tokens=tokens, target_tokens=targets, loss_inputs={}))
        mask_T = torch.tensor(sequence["loss_mask"], dtype=torch.float32)
        advantages.append(torch.tensor(sequence["advantages"], dtype=torch.float32) * mask_T)
    return References(data=data, advantages=advantages)


class WeighedBatches:
    """The batches of a replay, in the place of `source`; before each is handed out, the trainer scores what other
    batches were trained on.

    A batch's optimizer steps change the objective of another batch (`References.objective`) by the batch's gradient and
    by the momentum of the batches before it. With Adam the momentum's part is `momentum` times the change by the step
    before; what is left is to first order the inner product of the two batches' gradients, scaled as Adam scales
    (TracIn: Pruthi et al. 2020, https://arxiv.org/abs/2002.08484, with rollouts in the place of test examples). The
    gain is its median over the `window` batches before and the `window` after, so that another bad batch among them
    counts little; the batch itself does not count. Nothing is trained otherwise.
    """

    def __init__(
        self,
        source: BatchSource,
        trainer: TrainingClient,
        references: dict[int, References],
        *,
        window: int,
        momentum: float,
    ) -> None:
        """`references` are those of the batches that the replay trains, by step, in order. `momentum` is Adam's first
        beta, to the power of a batch's optimizer steps; with more than one step the correction is approximate."""
        self._source, self._trainer, self._window, self._momentum = source, trainer, window, momentum
        self._steps, self._references = list(references), list(references.values())
        self._objectives: list[dict[int, float]] = []
        """Per batch handed out, and once at the end: index of a batch -> its objective at that time."""

    async def next_batch(self) -> Batch:
        batch = await self._source.next_batch()
        await self._score()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    async def cancel(self) -> None:
        await self._source.cancel()

    async def influences(self) -> list[Influence]:
        """Of every batch that was trained, in order; called once, after the last of them."""
        await self._score()
        gains = np.array([self._gain(index) for index in range(len(self._objectives) - 1)])
        return [
            Influence(step=self._steps[index], gain=float(gain), deviations=_deviations(gains, index))
            for index, gain in enumerate(gains)
        ]

    async def _score(self) -> None:
        """Notes the objectives by which the batch before, the batch to come and the one after it are measured."""
        now = len(self._objectives)
        around = range(max(0, now - 1 - self._window), min(len(self._references), now + self._window + 2))
        answers = await asyncio.gather(*(self._references[index].objective(self._trainer) for index in around))
        self._objectives.append(dict(zip(around, answers, strict=True)))

    def _gain(self, index: int) -> float:
        near = range(index - self._window, index + self._window + 1)
        changes = [
            self._change(index, other) - (self._momentum * self._change(index - 1, other) if index else 0.0)
            for other in near
            if other != index and 0 <= other < len(self._references) and self._references[other].data
        ]
        return float(np.median(changes)) if changes else 0.0

    def _change(self, index: int, other: int) -> float:
        """What the steps of batch `index` changed of the objective of batch `other`."""
        return self._objectives[index + 1][other] - self._objectives[index][other]


def _deviations(gains: np.ndarray, index: int) -> float:
    near = np.delete(gains, index)[max(0, index - _NEIGHBOURS) : index + _NEIGHBOURS]
    if not len(near):
        return 0.0
    median = np.median(near)
    spread = 1.4826 * np.median(np.abs(near - median))  # of a normal distribution: its standard deviation
    return float((gains[index] - median) / spread) if spread else 0.0


def write_influences(file: Path, influences: list[Influence]) -> None:
    """A line of JSON for each batch."""
    file.write_text("".join(f"{json.dumps(asdict(influence))}\n" for influence in influences), encoding="utf-8")

"""The influence of each batch of a recorded run: whether it taught what the batches around it teach."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.rollout.batches import BatchSource
from torchtitan_rl.rollout.draws import Batch

__all__ = ["Influence", "WeighedBatches", "write_influences"]

_NEIGHBOURS = 10
"""Batches on either side that say which alignment is usual at this time of the run."""
_EPSILON = 1e-8
"""Added to the root of Adam's second moment, as Adam does."""
_ROUNDING = 1e-6
"""A change of the first moment below this share of it is rounding, and no gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Influence:
    """Of one batch."""

    step: int
    """The optimizer step with which the batch ended."""
    alignment: float
    """Mean cosine, from -1 to 1, between its gradient and those of the batches around it, in Adam's scale. Below 0: its
    step undid what the others teach. 0 for a batch without a gradient."""
    deviations: float
    """How far the alignment lies from the median of the batches around it, in standard deviations by their median
    absolute deviation."""


class WeighedBatches:
    """The batches of a replay, in the place of `source`; before each is handed out, the gradient of the batch before it
    is read from the moments of the trainer's Adam.

    Adam's first moment is an average of gradients: what a batch added to it is its gradient, after clipping; of several
    optimizer steps, their sum. To first order, the step of one batch raises the objective of another by the inner
    product of their gradients, each weight's share divided by the root of the second moment, as Adam divides (TracIn:
    Pruthi et al. 2020, https://arxiv.org/abs/2002.08484, with batches in the place of test examples). As a cosine it
    does not depend on the size of gradients and learning rates. A batch is compared with the `window` batches before it
    and the `window` after it, each gradient taken at its own batch's weights. Nothing is trained otherwise.

    Holds `window` + 2 gradients in memory.
    """

    def __init__(
        self,
        source: BatchSource,
        trainer: TrainingClient,
        step: Callable[[], int],
        version: Callable[[], int],
        *,
        window: int,
        beta1: float,
    ) -> None:
        """`step` says how many optimizer steps there were, `version` how many of them changed the weights. `beta1` is
        Adam's first beta."""
        self._source, self._trainer, self._step = source, trainer, step
        self._version, self._beta1 = version, beta1
        self._version_before = 0
        """The version when the last batch was handed out."""
        self._before: dict[str, torch.Tensor] | None = None
        """Adam's first moments when the last batch was handed out; None: none has been."""
        self._steps: list[int] = []
        """With which each batch ended."""
        self._last: deque[dict[str, torch.Tensor]] = deque(maxlen=window)
        """Gradients of the last batches in Adam's scale, of length 1; empty: it had none."""
        self._cosines: dict[int, list[float]] = defaultdict(list)
        """Index of a batch -> cosines between its gradient and those around it."""

    async def next_batch(self) -> Batch:
        batch = await self._source.next_batch()
        await self._read_gradient()
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    async def cancel(self) -> None:
        await self._source.cancel()

    async def influences(self) -> list[Influence]:
        """Of every batch that was trained, in order; called once, after the last of them."""
        await self._read_gradient()
        cosines = [self._cosines[index] for index in range(len(self._steps))]
        alignments = np.array([np.mean(batch_cosines) if batch_cosines else 0.0 for batch_cosines in cosines])
        return [
            Influence(step=step, alignment=float(alignments[index]), deviations=_deviations(alignments, index))
            for index, step in enumerate(self._steps)
        ]

    async def _read_gradient(self) -> None:
        """Compares the gradient of the batch that has trained since the last call with those of the batches before."""
        moments = await self._trainer.moments()
        if self._before is not None:
            taken = self._version() - self._version_before  # filters leave fewer minibatches, and steps are skipped
            direction = self._direction(moments, self._beta1**taken) if taken else {}
            index = len(self._steps)
            for distance, other in enumerate(reversed(self._last), start=1):
                if direction and other:
                    cosine = sum(float(direction[name] @ other[name]) for name in direction.keys() & other.keys())
                    self._cosines[index].append(cosine)
                    self._cosines[index - distance].append(cosine)
            self._steps.append(self._step())
            self._last.append(direction)
        self._before = {name: first for name, (first, _) in moments.items()}
        self._version_before = self._version()

    def _direction(
        self, moments: dict[str, tuple[torch.Tensor, torch.Tensor]], momentum: float
    ) -> dict[str, torch.Tensor]:
        """The batch's gradient times the root of what Adam multiplies it by, as vectors of length 1 in all; empty for a
        gradient of 0. The inner product of two such vectors has Adam's whole factor. `momentum` is the share of the
        first moments before the batch that is left."""
        assert self._before is not None
        scaled, lengths, rounding = dict[str, torch.Tensor](), list[float](), list[float]()
        for name, (first, second) in moments.items():
            factor = 1 / (second.float().sqrt() + _EPSILON).sqrt()
            earlier = torch.zeros_like(factor)
            if name in self._before:
                earlier = momentum * self._before[name] * factor
            scaled[name] = (first * factor - earlier).flatten()
            lengths.append(float(scaled[name].norm()))
            rounding.append(_ROUNDING * float(earlier.norm()))
        length = math.hypot(*lengths)
        return {name: part / length for name, part in scaled.items()} if length > math.hypot(*rounding) else {}


def _deviations(alignments: np.ndarray, index: int) -> float:
    near = np.delete(alignments, index)[max(0, index - _NEIGHBOURS) : index + _NEIGHBOURS]
    if not len(near):
        return 0.0
    median = np.median(near)
    spread = 1.4826 * np.median(np.abs(near - median))  # of a normal distribution: its standard deviation
    return float((alignments[index] - median) / spread) if spread else 0.0


def write_influences(file: Path, influences: list[Influence]) -> None:
    """A line of JSON for each batch."""
    file.write_text("".join(f"{json.dumps(asdict(influence))}\n" for influence in influences), encoding="utf-8")

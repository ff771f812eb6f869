"""Explains the gap between trainer and generators during training: every few steps, on a few rollouts, in parts and
in words."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from torchtitan_rl.algorithm.inputs import minibatch_groups, tasks_of
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.backend import Stack
from torchtitan_rl.mismatch import gap
from torchtitan_rl.mismatch.causes import Cause, mean_difference
from torchtitan_rl.mismatch.gap import Sample, joined
from torchtitan_rl.mismatch.scores import Rescorer, VersionGone, add_trainer, samples_of, tokens_of
from torchtitan_rl.mismatch.search import CauseSearch, EarlierScores, wrong_labels
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.record.recorder import Note, Recorder
from torchtitan_rl.record.records import Trained
from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.types import Rollout, RolloutGroup
from torchtitan_rl.types.run_state import RunState

__all__ = ["MismatchExplainer"]

logger = logging.getLogger(__name__)

_REMEMBERED, _PER_STEP = 8, 2
"""Steps whose tokens the trainer's log-probabilities are kept of, and sequences of a step."""
_LOOKED_AT_PARAMETERS = 100_000_000
"""Models with more parameters are not compared tensor by tensor."""


@dataclass(slots=True)
class _Scoring:
    """Rollouts of a batch that the generators score while the batch trains."""

    chosen: dict[int, list[Sample]]
    """Place of a rollout among all rollouts of the batch -> its samples."""
    task: asyncio.Task[bool]
    """Ends with whether the samples were scored."""


class MismatchExplainer:
    """Scores a few rollouts again by the generators, while they serve the version that sampled, and once more by the
    newest version while their batch trains. The trainer's log-probabilities are those that training computes anyway.
    No version is held for it, and no replica changes weights."""

    def __init__(self, config: RunConfig, stack: Stack, state: RunState, recorder: Recorder) -> None:
        self._every, self._number = config.record.explain_mismatch_every, config.record.explain_mismatch_rollouts
        self._algorithm, self._state, self._recorder = config.algorithm, state, recorder
        self._generator, self._stack, shape = stack.generator, stack, resolve_shape(config.model)
        rescorer = Rescorer(stack.generator, config.algorithm.temperature, shape.vocab_size)
        self._limits, self._keeps = gap.LIMITS[config.generator.dtype], config.generator.on_update == "keep"
        self._search = CauseSearch(
            rescorer=rescorer,
            limits=self._limits,
            dtype=config.generator.dtype,
            adapted=config.trainer.lora is not None,
            tensors=self._tensors if shape.num_parameters <= _LOOKED_AT_PARAMETERS else None,
        )
        self._rescorer, self._lagging = rescorer, bool(config.algorithm.max_policy_lag)
        self._max_model_len = config.generator.max_model_len
        self._early: dict[str, asyncio.Task[list[Sample]]] = {}
        """With a lag: the samples of a rollout, scored by the version that was served when the rollout ended."""
        self._trained: Sequence[Trained] = []
        self._memory: deque[EarlierScores] = deque(maxlen=_REMEMBERED)
        """Scores of the trainer at the last steps."""
        self._first: EarlierScores | None = None
        """Those of this attempt's first step."""
        self.cause: Cause | None = None
        """The cause, once it is known."""

    # Where a run calls: when a group has been played, before a batch trains, as it trains, afterwards.

    def score_early(self, group: RolloutGroup) -> None:
        """With a lag: has rollouts of a batch that will be explained scored by the version that is served now, as the
        group has just been played."""
        batch, place = divmod(int(group.id.split("/")[0]), self._algorithm.tasks_per_step)
        steps = self._algorithm.steps_per_batch
        if place < self._number and self._due(batch * steps, steps):
            share = math.ceil(self._number / self._algorithm.tasks_per_step)
            for rollout in group.rollouts[:share]:
                self._early[rollout.id] = asyncio.ensure_future(self._scored_early(rollout))

    @asynccontextmanager
    async def explain(self, groups: list[RolloutGroup]) -> AsyncIterator[dict[str, float]]:
        """While the batch of `groups` trains in this context, the generators score a few of its rollouts. When the
        context ends, the yielded dictionary has the parts of the gap, for the batch's line of metrics; it stays empty
        where no explanation is due."""
        metrics: dict[str, float] = {}
        if (scoring := await self._begin(groups)) is None:
            yield metrics
            return
        try:
            yield metrics
        except BaseException:
            scoring.task.cancel()
            raise
        began = time.perf_counter()
        if await scoring.task:
            metrics |= await running("explain the mismatch", self._explained(scoring.chosen))
        metrics["time/mismatch_s"] = time.perf_counter() - began

    async def _begin(self, groups: list[RolloutGroup]) -> _Scoring | None:
        """Chooses rollouts of a batch that is about to train and has the generators score them meanwhile; None where no
        explanation is due. With a lag `score_early` has decided, by the steps that batches without dropped groups
        take."""
        parts = minibatch_groups(tasks_of(groups), self._algorithm)
        if not self._lagging and not self._due(self._state.step, self._algorithm.num_epochs * len(parts)):
            return None
        if not (chosen := await running("explain the mismatch", self._chosen(groups))):
            return None
        samples = [sample for rollout_samples in chosen.values() for sample in rollout_samples]
        scoring = running("explain the mismatch", self._score(samples, newest=True))
        return _Scoring(chosen, asyncio.ensure_future(scoring))

    def note_trained(self, sequences: Sequence[Trained]) -> None:
        """Keeps the trainer's log-probabilities of the batch that trains."""
        self._trained = sequences
        with span("explain the mismatch"):
            remembered = self._remembered()
        if remembered is not None:
            self._first = self._first or remembered
            self._memory.append(remembered)

    # Choosing rollouts, and scoring them.

    def _due(self, step: int, steps: int) -> bool:
        return (step + steps) // self._every > step // self._every

    async def _chosen(self, groups: list[RolloutGroup]) -> dict[int, list[Sample]]:
        """Place of a rollout among all rollouts of the batch -> its samples. The rollouts are of the first minibatch,
        the first of each group before the second of any."""
        first, candidates, start = minibatch_groups(tasks_of(groups), self._algorithm)[0], [], 0
        for index, group in enumerate(groups):
            candidates.append(
                [(start + i, rollout) for i, rollout in enumerate(group.rollouts)] if index in first else []
            )
            start += len(group.rollouts)
        turns = [pair for pairs in zip_longest(*candidates) for pair in pairs if pair is not None]
        if not self._lagging:
            chosen = {place: samples_of(rollout) for place, rollout in turns[: self._number]}
        else:
            early = {place: self._early[rollout.id] for place, rollout in turns if rollout.id in self._early}
            self._early = dict(list(self._early.items())[-8 * self._number :])
            chosen = {place: await task for place, task in early.items()}
        return {place: samples for place, samples in chosen.items() if self._fits(samples)}

    def _fits(self, samples: list[Sample]) -> bool:
        if not samples or not all(len(sample.place_N) for sample in samples):
            return False  # nothing was sampled that could be scored again
        return max(len(sample.tokens) for sample in samples) < self._max_model_len

    async def _scored_early(self, rollout: Rollout) -> list[Sample]:
        samples = samples_of(rollout)
        if self._fits(samples):
            await running("explain the mismatch", self._score(samples, newest=False))
        return samples

    async def _score(self, samples: list[Sample], *, newest: bool) -> bool:
        """Fills in the scores of the served version; False where new weights came in between, and where the
        generators failed. Looks for the cause of the unexplained part at once, while that version is served."""
        try:
            if (served := await self._rescorer.served(samples)) is None:
                return False
            version, scores = served
            if newest and version != self._generator.policy_version:
                return False
            for sample, scores_N in zip(samples, scores, strict=True):
                if newest:
                    sample.between_N = scores_N
                if not (newest and self._lagging):
                    sample.ended_N, sample.ended_version = scores_N, version
                sample.sampled_N = np.where(sample.version_N == version, scores_N, sample.sampled_N)
            if self.cause is None:
                await self._look_at_generators(samples, version, newest)
        except VersionGone:  # in the middle of a search: the next explanation looks again
            return True
        except (RuntimeError, ValueError) as error:
            logger.warning("mismatch: rollouts could not be scored again: %s", error)
            return False
        return True

    def _remembered(self) -> EarlierScores | None:
        """A few of the tokens that train now, with the trainer's log-probabilities."""
        samples = []
        for datum, logprobs_T in self._trained[:_PER_STEP]:
            place_N = datum.loss_inputs["loss_mask"].nonzero()[:, 0].numpy() + 1
            if logprobs_T.dim() != 1 or not len(place_N):
                continue
            nobody = gap.unknown(len(place_N))
            sample = Sample(
                rollout="",
                tokens=tokens_of(datum),
                place_N=place_N,
                turn_N=np.zeros(len(place_N), int),
                version_N=np.zeros(len(place_N), int),
                reported_N=nobody,
            )
            sample.trainer_N = sample.scored(logprobs_T.tolist())
            samples.append(sample)
        return EarlierScores(self._generator.policy_version, samples) if samples else None

    # What it means.

    async def _explained(self, chosen: dict[int, list[Sample]]) -> dict[str, float]:
        for place, rollout_samples in chosen.items():
            add_trainer(rollout_samples, [pair for pair in self._trained if pair[0].rollout == place])
        samples = [sample for rollout_samples in chosen.values() for sample in rollout_samples]
        parts = gap.decomposed(samples, between="newest")
        served = self._generator.policy_version
        memory = [then for then in (self._first, *self._memory) if then is not None and then.version != served]
        noisy = "noise" in gap.parts_over_limit(parts, self._limits, keeps=self._keeps)
        if self.cause is None and noisy and memory:  # without memory no earlier version is known: the next time
            try:
                self._report(await self._search.of_noise(samples, memory))
            except (RuntimeError, ValueError) as error:
                logger.warning("mismatch: the cause could not be looked for: %s", error)
        return gap.part_metrics(parts)

    async def _look_at_generators(self, samples: list[Sample], version: int, newest: bool) -> None:
        """Reports tokens with a wrong version label, and the cause of the gap that the sampling version leaves."""
        moved = mean_difference(joined(samples, "between_N"), joined(samples, "ended_N")) if self._lagging else math.inf
        if newest and (label := wrong_labels(samples, self._limits, moved=moved)):
            return self._report(label)
        known = [sample for sample in samples if np.isfinite(sample.sampled_N).any()]
        if not known:
            return
        rest_N, kept_N = joined(known, "sampled_N") - joined(known, "reported_N"), joined(known, "kept_N")
        if self._limits.broken_by(rest_N[~kept_N]):
            search = dataclasses.replace(self._search, rescorer=self._rescorer.of_version(version))
            self._report(await search.of_rest(known))
        elif not self._keeps and self._limits.broken_by(rest_N[kept_N]):
            words = "requests went on with the attention cache of older weights, which generator.on_update rules out"
            self._report(Cause("rest", "stale_cache", words, math.nan))

    def _report(self, cause: Cause) -> None:
        self.cause = cause
        text = f"mismatch: step {self._state.step}: {cause.words} ({cause.part}: {cause.name}; see docs/mismatch.md)"
        logger.warning("%s", text)
        self._recorder.record(Note(text=text))

    async def _tensors(self) -> tuple[dict, dict, dict]:
        version = self._generator.policy_version
        published = await self._stack.versions.tensors(version)
        return published, await self._generator.weights(), await self._stack.roles["policy"].parameters()

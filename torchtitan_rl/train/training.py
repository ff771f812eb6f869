"""The reinforcement phase: the loop over batches, from judged groups to training data, one optimizer step."""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import torch

from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.inputs import minibatches
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.config.algorithm import AlgorithmConfig, ScheduleConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.policy_weights import PolicyWeights
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.record import attempts
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.record.records import Trained
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.rollout.draws import Batch, Draw, Draws, NothingToTrainOn, admissions, ends
from torchtitan_rl.rollout.resampling import fill_batch
from torchtitan_rl.train import lines, role_scores
from torchtitan_rl.train.checkpoints import Checkpoints
from torchtitan_rl.train.lines import StepMetrics
from torchtitan_rl.train.numeric_guard import note_bad_step
from torchtitan_rl.types import Datum, OptimParams, OptimStepOutput, RolloutGroup
from torchtitan_rl.types.ends import Ended, Preempted, StopRequest
from torchtitan_rl.types.run_state import RunState

__all__ = ["Batches", "Reinforcement", "scored", "step_on", "optim_params", "lr_factor", "count_bad", "timed"]


class Batches:
    """Rolls out slots in order, `tasks_per_step` slots and their replacements for each batch. The tasks of a batch
    depend on the seed and on the filters' decisions, not on the step that trains on the batch. Generation and training
    take turns; `train.ahead` overlaps them."""

    def __init__(
        self,
        config: RunConfig,
        play: Callable[[list[Draw], Counter], Awaitable[list[RolloutGroup]]],
        draws: Draws,
        state: RunState,
        admitted: Callable[[list[Draw], int], None],
    ) -> None:
        """`play` is `Rollouts.play`; `admitted` is told of draws that are about to be played, and after which step
        their batch is to train."""
        self._config, self._play, self._draws, self._state, self._admitted = config, play, draws, state, admitted
        self._max_tokens = config.sampling.max_tokens

    async def next_batch(self) -> Batch:
        """Rollouts of the next slots. With filters on, or groups dropped for a failure: the groups that are left, and
        replacements for the slots of the others. Raises NothingToTrainOn."""
        return await self._played(self._draws.next(self._config.algorithm.tasks_per_step), self._state.step)

    async def _played(self, draws: list[Draw], step: int) -> Batch:
        def play(draws: list[Draw], counts: Counter) -> Awaitable[list[RolloutGroup]]:
            self._admitted(draws, step)
            return self._play(draws, counts)

        config, counts = self._config.algorithm, Counter[str]()
        with span("play a batch", kind="phase"):
            groups = await play(draws, counts)
            filters, failed = config.filters, counts["failure/dropped_groups"]
            if groups and not failed and not filters.zero_variance and filters.overlong == "keep":
                return Batch(draws=draws, groups=groups, sampled=groups, metrics=dict(counts))
            replace, limit = self._draws.replace, self._max_tokens
            return await fill_batch(play, replace, draws, groups, config, counts, max_tokens=limit)

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws before the next batch."""
        return self._draws.state_dict()

    async def cancel(self) -> None:
        """Gives up what is being played: nothing between two calls of `next_batch`."""


class Reinforcement(ABC):
    """The reinforcement phase of a run. `Controller` adds what is before, between and after its steps."""

    config: RunConfig
    run_dir: RunDir
    recorder: Recorder
    state: RunState
    stop: StopRequest
    roles: dict[str, TrainingClient]
    generator: SamplingClient
    weights: PolicyWeights
    batches: Batches
    checkpoints: Checkpoints

    async def reinforce(self) -> None:
        """The steps of the reinforcement phase that are left.

        Raises NothingToTrainOn, after a checkpoint, when the filters leave nothing; Diverged after several bad steps in
        a row; Preempted, after a checkpoint, when the run was asked to stop; EarlyEnd by `controller.stop`.
        """
        try:
            await running("run the loop", self._reinforce())
        except Ended as end:
            await self._note_end(end)
            raise
        finally:
            await self.batches.cancel()

    async def _note_end(self, end: Ended) -> None:
        attempts.end_for_good(self.run_dir, str(end))
        if isinstance(end, NothingToTrainOn):
            self._record_batch(end.batch)
            await self.checkpoints.save(last=True)
            await self.checkpoints.require_written()

    async def _reinforce(self) -> None:
        """Generates, trains, publishes, and evaluates every `eval_every` steps."""
        config, state, recorder = self.config, self.state, self.recorder
        num_steps, state.phase, state.phase_step = config.controller.num_steps, "reinforcement", state.step
        with recorder.span("reinforcement", total=num_steps) as phase:
            recorder.advance(phase, state.step)
            while state.step < num_steps:
                first = state.step
                with recorder.span("step") as step:
                    with recorder.span("generate") as generate:
                        batch = await self.batches.next_batch()
                    line = await self.train_on(batch.groups, batch.sampled) | batch.metrics
                    with recorder.span("sync") as sync:
                        await self.publish()
                    if config.roles.refresh_reference_every or config.algorithm.refresh_teacher_every:
                        await self._refresh(first)
                line |= lines.of_times(line, step.seconds, generate.seconds, sync.seconds)
                recorder.fact("metrics", line=line, text=lines.summary(line, num_steps))
                self._record_batch(batch)
                recorder.advance(phase, state.step - first, text=f"reward {line['reward/mean']:.3f}")
                if state.step < num_steps:
                    if _passed(config.controller.eval_every, first, state.step):
                        await self.evaluate_all()
                    await self._between_steps(first)

    async def _refresh(self, since: int) -> None:
        """The policy's weights to the reference and to the snapshot, where that fell due after step `since`."""
        if _passed(self.config.roles.refresh_reference_every, since, self.state.step):
            await self.weights.copy_to("reference")
        if _passed(self.config.algorithm.refresh_teacher_every, since, self.state.step):
            await self.weights.set_teacher(self.policy_version)

    def _admitted(self, draws: list[Draw], step: int) -> None:
        self.recorder.fact("draws", step=step, records=admissions(draws))

    def _record_batch(self, batch: Batch) -> None:
        self.recorder.fact("draws", step=self.state.step, records=ends(batch))
        self.recorder.fact("rollouts", step=self.state.step, groups=batch.groups + batch.left_out)

    @abstractmethod
    async def evaluate_all(self) -> None:
        """The evaluations between steps: on the validation split, and those of `controller.eval_sets`."""

    async def _between_steps(self, since: int) -> None:
        """Writes a checkpoint where one fell due after step `since` of the phase. Raises Preempted or what
        the run is to fail with, after a checkpoint, where the run is to stop."""
        reason = self.stop.reason()
        if reason or _passed(self.config.controller.checkpoint_every, since, self.state.phase_step):
            await self.checkpoints.save()
        if reason:
            await self.checkpoints.require_written()
            raise self.stop.failure or Preempted(reason)

    async def train_on(self, groups: list[RolloutGroup], sampled: list[RolloutGroup] | None = None) -> dict:
        """All optimizer steps of one batch: `num_epochs` passes over its minibatches. Returns the batch's metrics.

        Metrics of rewards count `sampled`, which `groups` were chosen from. Does not publish. `mismatch/*` are computed
        on the first minibatch, before its step.
        """
        algorithm, line = self.config.algorithm, StepMetrics()
        with self.recorder.span("score") as score:
            data = await scored(groups, self.roles, algorithm)
        line.mean("time/score_s", score.seconds)
        with span("count metrics"):
            of_batch = lines.of_batch(sampled or groups, self.generator.policy_version, self.generator.health())
        trained: list[Trained] = []
        for epoch in range(algorithm.num_epochs):
            for minibatch in minibatches(data, algorithm, groups) if algorithm.tasks_per_minibatch else [data]:
                steps, logprobs = await step_on(minibatch, self.roles, self.config, self.state.step, line)
                self.state.step = self.state.phase_step = self.state.step + 1
                if bad := count_bad(self.state, steps):
                    limit = self.config.controller.max_skipped_steps
                    note_bad_step(self.run_dir, self.state, bad, steps, minibatch, max_skipped=limit)
                if epoch == 0:
                    trained += zip(minibatch, logprobs, strict=True)
        self.recorder.fact("trained", sequences=trained)
        return {**of_batch, "step": self.state.step, **line.line()}

    async def publish(self) -> int:
        """Sends the trainer's weights to every generator. Returns the policy version that now serves unpinned
        requests."""
        began = time.perf_counter()
        version = await self.weights.publish()
        self.recorder.fact("version", step=self.state.step, version=version, seconds=time.perf_counter() - began)
        return version

    @property
    def policy_version(self) -> int:
        """The version that serves unpinned requests. A version is a number of optimizer steps."""
        return self.generator.policy_version


async def scored(groups: list[RolloutGroup], roles: dict[str, TrainingClient], config: AlgorithmConfig) -> list[Datum]:
    """Training data of judged groups, with the scores of reference, teacher and critic. Raises ValueError for groups
    without a turn."""
    with span("make training data"):
        data = to_datums(groups, config)
    if not data:
        raise ValueError(f"groups: {len(groups)} of them hold no turn to train on; give rollouts with turns")
    if len(roles) > 1 or config.recompute_logprobs_per_batch:
        data = await role_scores.with_roles(data, groups, roles, config)
    return data


async def step_on(
    minibatch: list[Datum], roles: dict[str, TrainingClient], config: RunConfig, step: int, line: StepMetrics
) -> tuple[dict[str, tuple[OptimStepOutput, float]], list[torch.Tensor]]:
    """Optimizer step number `step` (from 0) of every role that trains; adds metrics to `line`.

    Returns role -> (output of `optim_step`, loss), and the policy's log-probabilities of the minibatch before the step,
    one tensor per datum.
    """
    policy, algorithm, others = roles["policy"], config.algorithm, {}
    alone = len(roles) == 1 and "soft_tokens" not in minibatch[0].loss_inputs
    if not alone or algorithm.recompute_logprobs_per_minibatch or algorithm.correction_denominator == "kept":
        critic = partial(optim_params, config, "critic", step)
        minibatch, others = await role_scores.before_step(minibatch, roles, algorithm, critic, line)
    start = time.perf_counter()
    with span("make training data"):
        objective = policy_objective(algorithm, minibatch[0].loss_inputs)
    forward_backward = policy.forward_backward(minibatch, objective)
    optim_step = policy.optim_step(optim_params(config, "policy", step))
    (output, forward_backward_s), (optim, step_s), *answers = await asyncio.gather(
        timed(forward_backward, start), timed(optim_step, start), *others.values()
    )
    line.add(output, optim)
    line.mean("time/forward_backward_s", forward_backward_s)
    line.mean("time/optim_s", step_s - forward_backward_s)
    return {"policy": (optim, output.loss), **dict(zip(others, answers, strict=True))}, output.policy_logprobs


def optim_params(config: RunConfig, role: str, step: int) -> OptimParams:
    """Optimizer parameters of a step: the role's peak learning rate times the schedule's factor."""
    factor = lr_factor(config.algorithm.schedule, step, config.controller.num_steps)
    trainer = config.trainer if role == "policy" else config.roles.configured()[role].trainer
    return OptimParams(lr=trainer.optimizer.lr * factor, betas=trainer.optimizer.betas)


async def timed(awaitable: Awaitable, start: float):
    """(result, seconds since `start`)."""
    result = await awaitable
    return result, time.perf_counter() - start


def lr_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Factor for optimizer step `step` (from 0) of `num_steps`; `num_steps` may be 1, or all steps warm-up."""
    # Rounded first: 0.07 x 100 is 7.000000000000001 in floating point, which is not eight steps.
    warmup_steps = config.warmup_steps or math.ceil(round(config.warmup_ratio * num_steps, 9))
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if config.decay == "constant":
        return 1.0
    remaining = num_steps - warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, remaining - 1))
    shape = 1 - progress if config.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.final_factor + (1 - config.final_factor) * shape


def count_bad(state: RunState, steps: dict[str, tuple[OptimStepOutput, float]]) -> list[str]:
    """Counts one optimizer step of each role of `steps`, which has the step's output and loss. Returns the roles whose
    step was bad: skipped, or with a loss that is not finite."""
    state.policy_version = steps["policy"][0].policy_version
    bad = [role for role, (optim, loss) in steps.items() if optim.skipped or not math.isfinite(loss)]
    for role in steps:
        state.skipped_in_a_row[role] = state.skipped_in_a_row[role] + 1 if role in bad else 0
    return bad


def _passed(every: int, since: int, step: int) -> bool:
    """Whether a multiple of `every` lies in (`since`, `step`]; False for `every` = 0."""
    return every > 0 and step // every > since // every

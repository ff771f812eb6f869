"""The preference phase: a loss of pairs, such as DPO's for the policy or Bradley and Terry's for a reward model."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import torch

from torchtitan_rl.algorithm import pairs
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.algorithm.pair_losses import loss_of
from torchtitan_rl.config.preference import PreferenceConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.record.recorder import Metrics, Recorder
from torchtitan_rl.rollout.player import RolloutPlayer
from torchtitan_rl.tasks.family import TaskFamily, source_of
from torchtitan_rl.train.role_step import RoleStep
from torchtitan_rl.train.step import lr_factor, with_seconds_since
from torchtitan_rl.train.trainer_speed import TrainerSpeed
from torchtitan_rl.types import Datum, LossFunction, OptimParams
from torchtitan_rl.types.run_state import RunState

__all__ = ["PairTrainer", "prefer"]


@dataclass(frozen=True, slots=True)
class PairTrainer:
    """Scores and trains one model on pairs. `config.role` says whether the model is a policy or has a value head."""

    config: PreferenceConfig
    client: TrainingClient
    reference: TrainingClient | None
    """None: for a model with a value head, and with `config.reference_free`."""

    @property
    def loss_fn(self) -> Callable:
        """The loss of pairs with its arguments."""
        return partial(loss_of(self.config), **self.config.loss_config)

    @property
    def reward_scale(self) -> float:
        """What a log-ratio is multiplied by to be an implicit reward: the loss's `beta`; 1 for a loss without it."""
        parameter = inspect.signature(self.loss_fn).parameters.get("beta")
        return 1.0 if parameter is None or parameter.default is parameter.empty else parameter.default

    def datums(self, sequences: pairs.Sequences) -> list[Datum]:
        """Two datums per pair, without weights yet. `sequences` are (prompt tokens, completion tokens) of the chosen
        and of the rejected completion of each pair in turn."""
        return (pairs.scored_datums if self.config.role == "policy" else pairs.value_datums)(sequences)

    async def scores(self, data: list[Datum]) -> torch.Tensor:
        """What the loss is a function of, one number per datum, float64 (N,): log-ratios to the reference, or values.
        One forward pass of each model; those of two models overlap."""
        if self.config.role != "policy":
            return pairs.last_values(data, (await self.client.forward(data)).values)
        models = [self.client] if self.reference is None else [self.client, self.reference]
        outputs = await asyncio.gather(*(model.forward(data, temperature=1.0) for model in models))
        mean = self.config.length_normalized
        policy_sums, *reference_sums = (
            pairs.completion_logprobs(data, output.policy_logprobs, mean=mean) for output in outputs
        )
        return policy_sums - reference_sums[0] if reference_sums else policy_sums

    def weighted(self, data: list[Datum], derivative_N: torch.Tensor) -> tuple[list[Datum], LossFunction]:
        """Datums and the token sum that together have the gradient of the loss with this derivative by the numbers."""
        if self.config.role != "policy":
            return pairs.with_value_coefficients(data, derivative_N), pairs.value_sum
        mean, sft_coef = self.config.length_normalized, self.config.sft_coef
        return pairs.with_logprob_coefficients(data, derivative_N, mean=mean, sft_coef=sft_coef), cross_entropy


async def prefer(
    config: RunConfig,
    family: TaskFamily,
    player: RolloutPlayer,
    trainer: PairTrainer,
    state: RunState,
    recorder: Recorder,
    *,
    speed: TrainerSpeed | None,
    count_step: Callable[[dict[str, RoleStep], list[Datum]], None],
    between_steps: Callable[[int], Awaitable[None]],
) -> None:
    """The steps of the phase that `state` does not have yet, on the pairs of the family's train split. Resets the
    optimizer's state at the end. `speed`, `count_step`, `between_steps` are as for `train.supervised.supervise`."""
    preference, client = trainer.config, trainer.client
    if state.phase != "preference" or state.phase_step >= preference.num_steps:  # not resumed within the phase
        state.phase, state.phase_step, state.preference_source = "preference", 0, {}
    source = source_of(family, "train", config.seed)
    if state.preference_source:
        source.load_state_dict(state.preference_source)
    loss_fn, scale = trainer.loss_fn, trainer.reward_scale
    with recorder.span("preference", total=preference.num_steps, done=state.phase_step) as phase:
        for step in range(state.phase_step, preference.num_steps):
            with recorder.span("step") as span:
                data = trainer.datums(player.pairs(source.next(preference.batch_size)))
                numbers_N, score_s = await with_seconds_since(span.began, trainer.scores(data))
                loss, derivative_N = pairs.pair_loss(numbers_N, loss_fn)
                if not torch.isfinite(derivative_N).all():  # the step counts as bad by its loss; datums hold numbers
                    derivative_N = torch.zeros_like(derivative_N)
                weighted, token_sum = trainer.weighted(data, derivative_N)
                lr = preference.lr * lr_factor(preference.schedule, step, preference.num_steps)
                start = time.perf_counter()
                forward_backward = client.forward_backward(weighted, token_sum, temperature=1.0)
                optim_step = client.optim_step(OptimParams(lr=lr, betas=preference.betas))
                output, forward_backward_s = await with_seconds_since(start, forward_backward)
                optim, both_s = await with_seconds_since(start, optim_step)
                step_s = time.perf_counter() - span.began
            state.phase_step, state.preference_source = step + 1, source.state_dict()
            steps: dict[str, RoleStep] = {preference.role: RoleStep(optim, loss)}
            count_step(steps, weighted)
            line = {
                "step": step + 1,
                "phase": "preference",
                "loss/mean": loss,
                **pairs.pair_metrics(numbers_N, scale),
                "optim/grad_norm": optim.grad_norm,
                "optim/lr": optim.lr,
                "tokens/trained_per_s": output.num_tokens / step_s,
                "time/step_s": step_s,
                "time/score_s": score_s,
                "time/forward_backward_s": forward_backward_s,
                "time/optim_s": both_s - forward_backward_s,
            }
            if speed is not None:
                line |= speed.metrics([len(datum) for datum in data], both_s)
            last = step + 1 == preference.num_steps
            if last and preference.eval_pairs:
                line |= await _validation_metrics(trainer, family, player)
            recorder.record(Metrics(line=line))
            recorder.advance(phase, text=f"loss {loss:.3f}, accuracy {line['rewards/accuracy']:.3f}")
            if not last:
                await between_steps(step)
    await client.reset_optimizer()


async def _validation_metrics(trainer: PairTrainer, family: TaskFamily, player: RolloutPlayer) -> dict[str, float]:
    """Loss and accuracy on the first pairs of the validation split, which never train."""
    size, num_pairs = family.num_tasks("validation"), trainer.config.eval_pairs
    tasks = [family.task("validation", index) for index in range(num_pairs if size is None else min(size, num_pairs))]
    numbers_N = await trainer.scores(trainer.datums(player.pairs(tasks)))
    loss, _ = pairs.pair_loss(numbers_N, trainer.loss_fn)
    accuracy = pairs.pair_metrics(numbers_N, trainer.reward_scale)["rewards/accuracy"]
    return {"rewards/validation_loss": loss, "rewards/validation_accuracy": accuracy}

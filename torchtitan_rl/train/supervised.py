"""The supervised phase: cross-entropy on the task's demonstrations."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from torchtitan_rl.algorithm.datums import demonstration_datums
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.record.recorder import Metrics, Recorder
from torchtitan_rl.rollout.player import RolloutPlayer
from torchtitan_rl.tasks.family import TaskFamily, source_of
from torchtitan_rl.train.role_step import RoleStep
from torchtitan_rl.train.step import lr_factor, with_seconds_since
from torchtitan_rl.train.trainer_speed import TrainerSpeed
from torchtitan_rl.types import Datum, OptimParams
from torchtitan_rl.types.run_state import RunState

__all__ = ["supervise"]


async def supervise(
    config: RunConfig,
    family: TaskFamily,
    player: RolloutPlayer,
    trainer: TrainingClient,
    state: RunState,
    recorder: Recorder,
    *,
    speed: TrainerSpeed | None,
    count_step: Callable[[dict[str, RoleStep], list[Datum]], None],
    between_steps: Callable[[int], Awaitable[None]],
) -> None:
    """The steps of the phase that `state` does not have yet, on the family's train split. Resets the optimizer's state
    at the end. `speed` makes the metrics `perf/*`; None: there are none.

    `count_step(steps, data)` is called after each step, see `numeric_guard.count_step`; `between_steps(n)` is
    awaited between step n + 1 and the next."""
    supervised = config.supervised
    if state.phase != "supervised" or state.phase_step >= supervised.num_steps:  # not resumed within the phase
        state.phase, state.phase_step, state.supervised_source = "supervised", 0, {}
    source = source_of(family, "train", config.seed)
    if state.supervised_source:
        source.load_state_dict(state.supervised_source)
    with recorder.span("supervised", total=supervised.num_steps, done=state.phase_step) as phase:
        for step in range(state.phase_step, supervised.num_steps):
            with recorder.span("step") as span:
                pairs = await player.demonstrations(source.next(supervised.batch_size), family)
                data = demonstration_datums(pairs, config.algorithm)
                lr = supervised.lr * lr_factor(supervised.schedule, step, supervised.num_steps)
                start = time.perf_counter()
                forward_backward = trainer.forward_backward(data, cross_entropy, temperature=1.0)
                optim_step = trainer.optim_step(OptimParams(lr=lr, betas=supervised.betas))
                output, forward_backward_s = await with_seconds_since(start, forward_backward)
                optim, both_s = await with_seconds_since(start, optim_step)
                step_s = time.perf_counter() - span.began
            state.phase_step, state.supervised_source = step + 1, source.state_dict()
            steps = {"policy": RoleStep(optim, output.loss)}
            count_step(steps, data)
            line = {
                "step": step + 1,
                "phase": "supervised",
                "loss/mean": output.loss,
                "optim/grad_norm": optim.grad_norm,
                "optim/lr": optim.lr,
                "tokens/trained_per_s": output.num_tokens / step_s,
                "time/step_s": step_s,
                "time/forward_backward_s": forward_backward_s,
                "time/optim_s": both_s - forward_backward_s,
            }
            if speed is not None:
                line |= speed.metrics([len(datum) for datum in data], both_s)
            recorder.record(Metrics(line=line))
            recorder.advance(phase, text=f"loss {output.loss:.3f}")
            if step + 1 < supervised.num_steps:
                await between_steps(step)
    await trainer.reset_optimizer()

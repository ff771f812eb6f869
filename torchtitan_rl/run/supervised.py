"""The supervised phase: cross-entropy on the task's demonstrations."""

from __future__ import annotations

from torchtitan_rl.algorithm.demonstrations import demonstration_datums
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.algorithm.schedules import lr_factor
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.observability.recorder import Recorder
from torchtitan_rl.run.checkpoints import RunState
from torchtitan_rl.run.rollouts import Rollouts
from torchtitan_rl.run.training import timed
from torchtitan_rl.tasks.family import TaskFamily, source_of
from torchtitan_rl.types import OptimParams

__all__ = ["supervise"]


async def supervise(
    config: RunConfig,
    family: TaskFamily,
    player: Rollouts,
    trainer: TrainingClient,
    state: RunState,
    recorder: Recorder,
) -> None:
    """All steps of the phase on the family's train split. Resets the optimizer's state at the end."""
    supervised, state.phase, state.phase_step = config.supervised, "supervised", 0
    source = source_of(family, "train", config.seed)
    with recorder.span("supervised", total=supervised.num_steps) as phase:
        for step in range(supervised.num_steps):
            with recorder.span("step") as span:
                pairs = await player.demonstrations(source.next(supervised.batch_size), family)
                data = demonstration_datums(pairs, config.algorithm)
                lr = supervised.lr * lr_factor(supervised.schedule, step, supervised.num_steps)
                forward_backward = trainer.forward_backward(data, cross_entropy, temperature=1.0)
                optim_step = trainer.optim_step(OptimParams(lr=lr, betas=supervised.betas))
                output, forward_backward_s = await timed(forward_backward, span.began)
                optim, step_s = await timed(optim_step, span.began)
            state.count_skips({"policy": optim}, config.controller.max_skipped_steps)
            state.phase_step = step + 1
            line = {
                "step": step + 1,
                "phase": "supervised",
                "loss/mean": output.loss,
                "optim/grad_norm": optim.grad_norm,
                "optim/lr": optim.lr,
                "tokens/trained_per_s": output.num_tokens / step_s,
                "time/step_s": step_s,
                "time/forward_backward_s": forward_backward_s,
                "time/optim_s": step_s - forward_backward_s,
            }
            recorder.fact("metrics", line=line, text="")
            recorder.advance(phase, text=f"loss {output.loss:.3f}")
    await trainer.reset_optimizer()

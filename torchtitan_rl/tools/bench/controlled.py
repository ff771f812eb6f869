"""A controller on actors as a run has it, whose tasks say how long completions are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from torchtitan_rl.algorithm import presets, reductions
from torchtitan_rl.config.meshes import AdamWConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.record import RecordConfig
from torchtitan_rl.config.run import ControllerConfig, RunConfig, SamplingConfig
from torchtitan_rl.tools.bench.generation import CALL_S
from torchtitan_rl.tools.bench.length_tasks import LengthTasks, of_known_length
from torchtitan_rl.tools.bench.workload import PROMPT_TOKENS, Lengths, Workload
from torchtitan_rl.train.controller import Controller

__all__ = ["CLIP", "LR", "MAX_NORM", "group_lengths", "launched", "run_config", "set_lengths"]

LR, CLIP, MAX_NORM = 1e-6, 0.2, 1.0


def run_config(workload: Workload, model: Path, run: Path, *, lag: int = 0) -> RunConfig:
    """A run of GRPO on a workload: `num_prompts` tasks a step, a mean over tokens, one optimizer step a batch."""
    config = RunConfig(
        name="bench",
        output_dir=str(run),
        task=LengthTasks.Config(lengths=group_lengths(workload, "fixed")),
        model=ModelConfig(assets=str(model), shape=workload.shape, pretrained=True),
        algorithm=presets.grpo(
            tasks_per_step=workload.num_prompts,
            group_size=workload.group_size,
            reduction=reductions.token_mean,
            loss_config={"clip_low": CLIP, "clip_high": CLIP},
            workflow=of_known_length,
            max_policy_lag=lag,
        ),
        controller=ControllerConfig(
            num_steps=1, eval_every=0, start_timeout_s=CALL_S, call_timeout_s=CALL_S, sample_timeout_s=CALL_S
        ),
        sampling=SamplingConfig(max_prompt_tokens=PROMPT_TOKENS, max_tokens=workload.context - PROMPT_TOKENS),
        trainer=TrainerConfig(optimizer=AdamWConfig(lr=LR)),
        generator=workload.generator(),
        record=RecordConfig(timeline=True),
    )
    config.supervised.num_steps = 0
    training = config.trainer.training
    training.seq_len, training.mixed_precision_param = workload.context, workload.dtype
    training.max_norm = MAX_NORM
    return config


def group_lengths(workload: Workload, lengths: Lengths) -> list[list[int]]:
    """The lengths of a batch's completions, those of each group together."""
    batch_lengths, size = workload.completion_lengths(lengths), workload.group_size
    return [batch_lengths[first : first + size] for first in range(0, len(batch_lengths), size)]


@asynccontextmanager
async def launched(config: RunConfig) -> AsyncIterator[Controller]:
    """A controller whose generators serve the trainer's weights; stopped at the end."""
    async with await Controller.launch(config) as controller:
        yield controller


def set_lengths(controller: Controller, lengths: list[list[int]]) -> None:
    """Of tasks that are drawn from now on, see `LengthTasks`."""
    family = controller.family
    assert isinstance(family, LengthTasks)
    family.lengths = lengths

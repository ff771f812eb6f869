"""Tokens per second of training: the policy's trainer through its client, beside a bare loop in torch.

Both take one optimizer step on the same tokens with the same loss, PPO's clipped surrogate, and begin with the same
weights. The bare loop has transformers' model, sorts sequences by length into padded microbatches, and has torch's
fused AdamW. Ours packs sequences without padding, and sends data and log-probabilities between two processes. Where
compiled sides are asked for, each side runs eager and by torch.compile.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchtitan_rl import adapters, platform
from torchtitan_rl.algorithm import presets
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.config.meshes import AdamWConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.tools.bench.controlled import CLIP, LR, MAX_NORM
from torchtitan_rl.tools.bench.generation import CALL_S
from torchtitan_rl.tools.bench.measurement import OURS, OURS_COMPILED, Measurement, Repeat
from torchtitan_rl.tools.bench.side import Once, OpenSide, in_turn, opened
from torchtitan_rl.tools.bench.step_parts import StepRecorder, step_parts
from torchtitan_rl.tools.bench.workload import PROMPT_TOKENS, Lengths, Workload
from torchtitan_rl.types import Datum

__all__ = ["TORCH", "TORCH_COMPILED", "BareTrainer", "bare_torch", "measure_training", "training_batch"]

TORCH, TORCH_COMPILED = "bare torch", "bare torch compiled"
_MICROBATCHES = (8, 16, 32)
"""Sequences of a padded microbatch that the bare loop tries; it keeps the fastest."""
_LOGITS_BYTES = 2**29
"""Of one padded microbatch's logits at most."""


def measure_training(
    workload: Workload,
    all_lengths: Sequence[Lengths],
    repeats: int,
    scratch: Path,
    note: Callable[[str], None],
    *,
    compiled: bool,
) -> list[Measurement]:
    """A measurement per distribution of lengths; amounts are trained tokens, without those of prompts. `compiled`: both
    sides also run compiled, and of each the faster one counts."""
    model = scratch / "model"
    workload.write_model(model)
    sides: dict[str, OpenSide] = {
        OURS: partial(_ours, workload, model, scratch / OURS, compiled=False),
        TORCH: partial(bare_torch, workload, model),
    }
    if compiled:
        sides[OURS_COMPILED] = partial(_ours, workload, model, scratch / OURS_COMPILED, compiled=True)
        sides[TORCH_COMPILED] = partial(bare_torch, workload, model, compiled=True)
    note(f"starting {', '.join(sides)}")
    with opened(sides, scratch / "logs") as processes:
        measured = in_turn(processes, all_lengths, repeats, note)
    measurements = []
    for lengths, measured_sides in measured.items():
        measurement = Measurement(
            name=f"train {workload.size} {workload.dtype} {lengths}", unit="tokens", sides=measured_sides
        )
        steps = [repeat.step for repeat in measurement.sides[measurement.best]]
        measurement.parts = step_parts(scratch / measurement.best, steps)
        measurements.append(measurement)
    return measurements


def training_batch(workload: Workload, lengths: Lengths, repeat: int) -> list[Datum]:
    """The completions of a batch as training data, with an advantage each. Token weights sum to 1."""
    draw, completion_lengths = torch.Generator().manual_seed(repeat), workload.completion_lengths(lengths)
    total, batch = sum(completion_lengths), []
    for prompt, length in zip(workload.prompts(repeat), completion_lengths, strict=True):
        completion_T = torch.randint(3, workload.shape.vocab_size, (length,), generator=draw)
        tokens_T = torch.cat([torch.tensor(prompt), completion_T])
        mask_T = (torch.arange(len(tokens_T) - 1) >= PROMPT_TOKENS - 1).float()
        loss_inputs = {
            "loss_mask": mask_T,
            "token_weights": mask_T / total,
            "advantages": mask_T * torch.randn((), generator=draw),
            "sampling_logprobs": mask_T * -math.log(workload.shape.vocab_size),
        }
        batch.append(Datum(tokens=tokens_T[:-1], target_tokens=tokens_T[1:], loss_inputs=loss_inputs))
    return batch


@asynccontextmanager
async def _ours(workload: Workload, model: Path, timeline: Path, *, compiled: bool) -> AsyncIterator[Once]:
    """The policy's trainer as a run has it, and its client in this process."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(model.parent / "compiled")
    recorder = StepRecorder(timeline)
    config = TrainerConfig(optimizer=AdamWConfig(lr=LR))
    config.compile.enable = compiled
    config.training.seq_len, config.training.mixed_precision_param = workload.context, workload.dtype
    config.training.max_norm = MAX_NORM
    launcher = ActorLauncher(log_dir=None, start_timeout_s=CALL_S, call_timeout_s=CALL_S)
    try:
        model_config = ModelConfig(assets=str(model), shape=workload.shape, pretrained=True)
        mesh = await launcher.start_trainer(config, model_config, role="policy", seed=0)
        policy = MeshTrainingClient(
            mesh,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            max_datum_tokens=workload.context,
            temperature=1.0,
            vocab_size=workload.shape.vocab_size,
        )

        async def once(lengths: Lengths, repeat: int) -> Repeat:
            batch = training_batch(workload, lengths, repeat)
            objective = policy_objective(presets.grpo(), batch[0].loss_inputs)
            with recorder.step() as step:
                output, _ = await asyncio.gather(policy.forward_backward(batch, objective), policy.optim_step())
            return Repeat(seconds=step.seconds, amount=output.num_tokens, step=recorder.number)

        yield once
    finally:
        await launcher.stop()
        recorder.close()


@asynccontextmanager
async def bare_torch(workload: Workload, model: Path, *, compiled: bool = False) -> AsyncIterator[Once]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(model.parent / "compiled")
    platform.set_threads(0)
    trainer = BareTrainer(workload, model, compiled=compiled)
    sizes: dict[Lengths, int] = {}

    async def once(lengths: Lengths, repeat: int) -> Repeat:
        batch = training_batch(workload, lengths, repeat)
        if lengths not in sizes:
            sizes[lengths] = trainer.fastest_size(batch)
        seconds = trainer.step(batch, sizes[lengths])
        return Repeat(seconds=seconds, amount=sum(workload.completion_lengths(lengths)))

    yield once


class BareTrainer:
    """A model of transformers with float32 parameters, and AdamW. In bfloat16 it computes under autocast."""

    def __init__(self, workload: Workload, directory: Path, *, compiled: bool = False) -> None:
        from transformers import AutoModelForCausalLM

        self.device = platform.local_device(0)
        self._workload, self._autocast = workload, workload.dtype == "bfloat16"
        with adapters.nameless_semaphores():  # its progress bar makes a lock
            model = AutoModelForCausalLM.from_pretrained(
                str(directory), dtype=torch.float32, attn_implementation="sdpa"
            )
        self._model: Any = model.train().to(self.device)
        if compiled:
            self._model.compile()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=0.0, fused=True)
        self.loss = 0.0
        """Of the last step."""

    def fastest_size(self, batch: list[Datum]) -> int:
        """The number of sequences in a microbatch with which a step takes least."""
        sizes = [size for size in _MICROBATCHES if size <= len(batch)] or [len(batch)]
        for size in sizes:
            self.step(batch, size)  # allocates memory and the optimizer's moments, or compiles
        return min(sizes, key=lambda size: self.step(batch, size))

    def step(self, batch: list[Datum], size: int) -> float:
        """One optimizer step, in microbatches of `size` sequences of about equal length. Returns the seconds."""
        start = time.perf_counter()
        self.loss = 0.0
        ordered = sorted(batch, key=len, reverse=True)
        while ordered:
            fitting = _LOGITS_BYTES // (4 * len(ordered[0]) * self._workload.shape.vocab_size)
            count = max(1, min(size, fitting))
            self.loss += self._backward(ordered[:count])
            del ordered[:count]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _backward(self, microbatch: list[Datum]) -> float:
        """Adds the gradient of a microbatch. Padding lies to the right: causal attention needs no other mask."""

        def padded(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(self.device)

        tokens_BL = padded([datum.tokens for datum in microbatch])
        targets_BL = padded([datum.target_tokens for datum in microbatch])[:, PROMPT_TOKENS - 1 :]
        weights_BL, advantages_BL, old_BL = (
            padded([datum.loss_inputs[name] for datum in microbatch])[:, PROMPT_TOKENS - 1 :]
            for name in ("token_weights", "advantages", "sampling_logprobs")
        )
        num_targets = targets_BL.shape[1]  # no loss is on the prompt, so no logits are computed there
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            logits_BLV = self._model(input_ids=tokens_BL, use_cache=False, logits_to_keep=num_targets).logits.float()
        logprobs_BL = logits_BLV.log_softmax(-1).gather(2, targets_BL[..., None])[..., 0]
        ratio_BL = (logprobs_BL - old_BL).exp()
        objective_BL = torch.minimum(ratio_BL * advantages_BL, ratio_BL.clamp(1 - CLIP, 1 + CLIP) * advantages_BL)
        loss = -(weights_BL * objective_BL).sum()
        loss.backward()
        return loss.item()

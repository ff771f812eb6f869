"""Seconds of a weight sync: from a trainer's process to a generator's, beside one memcpy of the trainer's bytes.

A sync is a publication, which casts, writes and sums up, and a pull, which checks the sums and loads; checksums are on.
The memcpy is torch's copy of the float32 parameters, in warm memory.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import torch

from torchtitan_rl import platform
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.config.meshes import AdamWConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.tools.bench.generation import CALL_S
from torchtitan_rl.tools.bench.measurement import OURS, Measurement, Repeat
from torchtitan_rl.tools.bench.side import Once, OpenSide, in_turn, opened
from torchtitan_rl.tools.bench.step_parts import StepRecorder, step_parts
from torchtitan_rl.tools.bench.workload import EOS, Lengths, Workload
from torchtitan_rl.types import Datum

__all__ = ["MEMCPY", "measure_sync"]

MEMCPY = "memcpy"
_BLOCK = 2**28
"""Bytes of the two buffers between which the floor copies, several times where the model is larger."""


def measure_sync(workload: Workload, repeats: int, scratch: Path, note: Callable[[str], None]) -> list[Measurement]:
    """Two measurements: the first sync, whose memory is touched for the first time, and those after it."""
    model, timeline = scratch / "model", scratch / "timeline"
    workload.write_model(model)
    sides: dict[str, OpenSide] = {OURS: partial(_ours, workload, model, timeline), MEMCPY: partial(_memcpy, workload)}
    note(f"starting {', '.join(sides)}")
    with opened(sides, scratch / "logs") as processes:
        first = {side.name: [side.once("fixed", 0)] for side in processes}
        later = in_turn(processes, ["fixed"], repeats, note)["fixed"]
    return [
        Measurement(
            name=f"sync {workload.size} {workload.dtype} {when}",
            unit="bytes",
            sides=measured_sides,
            parts=step_parts(timeline, [repeat.step for repeat in measured_sides[OURS]]),
        )
        for when, measured_sides in (("first", first), ("later", later))
    ]


@asynccontextmanager
async def _ours(workload: Workload, model: Path, timeline: Path) -> AsyncIterator[Once]:
    """A trainer, a generator and the store, as a run has them. The trainer takes a step before each sync."""
    recorder = StepRecorder(timeline)
    config = RunConfig(
        name="bench",
        task=None,
        model=ModelConfig(assets=str(model), shape=workload.shape, pretrained=True),
        trainer=TrainerConfig(optimizer=AdamWConfig(lr=1e-6)),
        generator=workload.generator(),
    )
    config.trainer.training.seq_len, config.generator.kv_cache_gib = workload.context, 0.25
    config.generator.max_num_seqs = 1
    launcher = ActorLauncher(log_dir=None, start_timeout_s=CALL_S, call_timeout_s=CALL_S)
    try:
        stack = await launcher.start(config, model, eos=EOS)
        ones_T = torch.ones(4)
        datum = Datum(
            tokens=torch.tensor([3, 4, 5, 6]),
            target_tokens=torch.tensor([4, 5, 6, 7]),
            loss_inputs={"loss_mask": ones_T, "token_weights": ones_T / 4},
        )

        async def once(lengths: Lengths, repeat: int) -> Repeat:
            await stack.roles["policy"].forward_backward([datum], cross_entropy)
            await stack.roles["policy"].optim_step()
            with recorder.step() as step:
                await stack.generator.push_and_pull()
            return Repeat(seconds=step.seconds, amount=_source_bytes(workload), step=recorder.number)

        yield once
        stack.generator.close()
    finally:
        await launcher.stop()
        recorder.close()


@asynccontextmanager
async def _memcpy(workload: Workload) -> AsyncIterator[Once]:
    platform.set_threads(0)
    num_bytes = _source_bytes(workload)
    source = torch.ones(min(num_bytes, _BLOCK), dtype=torch.uint8)
    target = torch.zeros_like(source)

    async def once(lengths: Lengths, repeat: int) -> Repeat:
        start, left = time.perf_counter(), num_bytes
        while left > 0:
            part = min(left, len(source))
            target[:part].copy_(source[:part])
            left -= part
        return Repeat(seconds=time.perf_counter() - start, amount=num_bytes)

    yield once


def _source_bytes(workload: Workload) -> int:
    """Of the trainer's float32 parameters."""
    return 4 * workload.shape.num_parameters

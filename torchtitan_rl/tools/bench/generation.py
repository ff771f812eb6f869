"""Tokens per second of generation: the sampling client over a generator's process, beside vLLM alone.

Both compute the same model with the same weights, and return the log-probability of each token. vLLM alone runs its own
model of the family in the process that asks, and its requests share random numbers; ours have a seed each, as those of
a run have.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from torchtitan_rl import adapters, platform
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.tools.bench.measurement import OURS, OURS_COMPILED, Measurement, Repeat
from torchtitan_rl.tools.bench.side import Once, OpenSide, in_turn, opened
from torchtitan_rl.tools.bench.step_parts import StepRecorder, step_parts
from torchtitan_rl.tools.bench.workload import Lengths, Workload
from torchtitan_rl.types import SamplingParams

__all__ = ["CALL_S", "COMPILED", "EAGER", "FLOORS", "measure_generation", "vllm_alone"]

EAGER, COMPILED = "vLLM eager", "vLLM compiled"
FLOORS = {"eager": EAGER, "compiled": COMPILED}
"""Word of the command -> how vLLM alone runs."""
CALL_S = 600.0
"""Seconds that one call of a generator or trainer may take, and its start."""


def measure_generation(
    workloads: Sequence[Workload],
    all_lengths: Sequence[Lengths],
    repeats: int,
    scratch: Path,
    note: Callable[[str], None],
    *,
    floors: Sequence[str],
) -> list[Measurement]:
    """A measurement per distribution of lengths and workload. The sides of all workloads take turns in each round.

    `floors`: how vLLM alone runs, of `EAGER` and `COMPILED`. Where it runs compiled, ours does too; of each the faster
    one counts.
    """
    our_names = (OURS, OURS_COMPILED) if COMPILED in floors else (OURS,)
    sides: dict[str, OpenSide] = {}
    for workload in workloads:
        model = _directory(workload, scratch) / "model"
        workload.write_model(model)
        for name in our_names:
            timeline = _timeline(workload, scratch, name)
            sides[_full_name(workload, name)] = partial(
                _ours, workload, model, timeline, compiled=name != OURS, eager=COMPILED not in floors
            )
        for floor in floors:
            alone = partial(vllm_alone, workload, model, eager=floor == EAGER)
            sides[_full_name(workload, floor)] = alone
    note(f"starting {', '.join(sides)}")
    with opened(sides, scratch / "logs") as processes:
        measured = in_turn(processes, all_lengths, repeats, note)
    measurements = []
    for lengths, measured_sides in measured.items():
        for workload in workloads:
            measurement = Measurement(
                name=f"generate {workload.name} {workload.dtype} {lengths}",
                unit="tokens",
                sides={side: measured_sides[_full_name(workload, side)] for side in (*our_names, *floors)},
            )
            steps = [repeat.step for repeat in measurement.sides[measurement.best]]
            measurement.parts = step_parts(_timeline(workload, scratch, measurement.best), steps)
            measurements.append(measurement)
    return measurements


def _full_name(workload: Workload, side: str) -> str:
    """Of a side among those of several workloads."""
    return f"{workload.name} {side}"


def _directory(workload: Workload, scratch: Path) -> Path:
    return scratch / workload.name.replace(" ", "-")


def _timeline(workload: Workload, scratch: Path, side: str) -> Path:
    return _directory(workload, scratch) / f"timeline of {side}"


@asynccontextmanager
async def _ours(workload: Workload, model: Path, timeline: Path, *, compiled: bool, eager: bool) -> AsyncIterator[Once]:
    """A generator as a run has it, and the sampling client in this process. `eager`: without CUDA graphs and without
    steps that are scheduled ahead, as vLLM eager."""
    os.environ["VLLM_CACHE_ROOT"] = str(model.parent / "compiled")
    recorder, generator_config = StepRecorder(timeline), workload.generator()
    generator_config.compile = compiled
    if eager:
        generator_config.enforce_eager, generator_config.async_scheduling = True, False
    config = RunConfig(
        name="bench",
        task=None,
        model=ModelConfig(assets=str(model), shape=workload.shape, pretrained=True),
        generator=generator_config,
    )
    launcher = ActorLauncher(log_dir=None, start_timeout_s=CALL_S, call_timeout_s=CALL_S)
    try:
        generator = (await launcher.start_generators(config, model)).generator
        await generator.load_hf(str(model))

        async def once(lengths: Lengths, repeat: int) -> Repeat:
            params = [
                SamplingParams(max_tokens=length, ignore_eos=True, seed=seed)
                for seed, length in enumerate(workload.completion_lengths(lengths))
            ]
            with recorder.step() as step:
                completions = await asyncio.gather(*map(generator.sample, workload.prompts(repeat), params))
            amount = sum(len(completion.tokens) for completion in completions)
            return Repeat(seconds=step.seconds, amount=amount, step=recorder.number)

        yield once
        generator.close()
    finally:
        await launcher.stop()
        recorder.close()


@asynccontextmanager
async def vllm_alone(workload: Workload, model: Path, *, eager: bool) -> AsyncIterator[Once]:
    """vLLM in this process, on all cores."""
    os.environ["VLLM_CACHE_ROOT"] = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(model.parent / "compiled")
    adapters.prepare_vllm(eager=eager)
    from torchtitan_rl.engine.own_model import VllmAlone

    platform.set_threads(0)
    config = workload.generator()
    engine = VllmAlone(
        model,
        dtype=workload.dtype,
        max_model_len=workload.context,
        kv_cache_bytes=int(config.kv_cache_gib * 2**30),
        max_num_seqs=workload.num_completions,
        eager=eager,
    )
    platform.set_threads(0)  # vLLM's worker has set another number
    try:

        async def once(lengths: Lengths, repeat: int) -> Repeat:
            prompts, completion_lengths = workload.prompts(repeat), workload.completion_lengths(lengths)
            start = time.perf_counter()
            completions = engine.sample(prompts, completion_lengths)
            seconds = time.perf_counter() - start
            return Repeat(seconds=seconds, amount=sum(map(len, completions)))

        yield once
    finally:
        engine.close()

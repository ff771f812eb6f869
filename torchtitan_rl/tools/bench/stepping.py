"""Seconds of a whole step of GRPO, from the draw of its tasks to weights that serve: a controller, beside TRL.

Both have the same weights, prompts, lengths of completions, reward, loss and number of updates. TRL generates with
transformers in the process that trains. At lag 0 a step of ours is taken alone. At lag 1 generation and training
overlap, so that several steps are taken in a row, and those count that neither begin nor end the row.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from torchtitan_rl import environment
from torchtitan_rl.record.recorder import Listener, Metrics
from torchtitan_rl.tools.bench.controlled import CLIP, LR, MAX_NORM, group_lengths, launched, run_config, set_lengths
from torchtitan_rl.tools.bench.length_tasks import prompt_text
from torchtitan_rl.tools.bench.measurement import OURS, Measurement, Repeat
from torchtitan_rl.tools.bench.side import Once, OpenSide, in_turn, opened
from torchtitan_rl.tools.bench.step_parts import step_parts
from torchtitan_rl.tools.bench.workload import Lengths, Workload

__all__ = ["LAGS", "TRL", "measure_steps", "steps_of_a_run"]

_PROGRAM = Path(__file__).with_name("trl_floor.py")
TRL = {1: "TRL", 8: "TRL, 8 microbatches"}
"""Microbatches of a step -> the side that splits a batch so; the faster one counts."""
LAGS = (0, 1)
_ROW = 6
"""Steps in a row at lag 1; the first and the last do not count: they have less to overlap with."""


def measure_steps(
    workload: Workload,
    all_lengths: Sequence[Lengths],
    repeats: int,
    scratch: Path,
    note: Callable[[str], None],
    *,
    python: str,
) -> list[Measurement]:
    """A measurement per distribution of lengths and lag; amounts are sampled tokens. `python`: of TRL's environment."""
    model = scratch / "model"
    workload.write_model(model)
    sides: dict[str, OpenSide] = {
        _ours_at(lag): partial(steps_of_a_run, workload, model, scratch / f"run-{lag}", lag=lag) for lag in LAGS
    }
    for microbatches, side in TRL.items():
        work = scratch / f"trl-{microbatches}.json"
        write_work(work, workload, all_lengths, repeats, model, microbatches)
        sides[side] = partial(_trl, workload, work, python)
    note(f"starting {', '.join(sides)}")
    with opened(sides, scratch / "logs") as processes:
        measured = in_turn(processes, all_lengths, repeats, note)
    measurements = []
    for lengths, measured_sides in measured.items():
        for lag in LAGS:
            ours = measured_sides[_ours_at(lag)]
            numbers = [repeat.step - before for repeat in ours for before in range(_counted(lag))]
            measurements.append(
                Measurement(
                    name=f"step {workload.name} {workload.dtype} {lengths} lag {lag}",
                    unit="tokens",
                    sides={OURS: ours} | {side: measured_sides[side] for side in TRL.values()},
                    parts=step_parts(scratch / f"run-{lag}" / "timeline", numbers),
                )
            )
    return measurements


def write_work(
    file: Path, workload: Workload, all_lengths: Sequence[Lengths], repeats: int, model: Path, microbatches: int
) -> None:
    """Writes what `trl_floor` is to do: for each distribution of lengths a step that warms up and one per repeat."""
    rounds = repeats + 1
    work = {
        "model": str(model),
        "bf16": workload.dtype == "bfloat16",
        "microbatches": microbatches,
        "group_size": workload.group_size,
        "clip": CLIP,
        "lr": LR,
        "max_norm": MAX_NORM,
        "parts": [
            {
                "steps": rounds,
                "lengths": workload.completion_lengths(lengths),
                "prompts": [prompt_text(index) for index in range(rounds * workload.num_prompts)],
            }
            for lengths in all_lengths
        ],
    }
    file.write_text(json.dumps(work))


def _ours_at(lag: int) -> str:
    return f"{OURS} at lag {lag}"


def _counted(lag: int) -> int:
    """The steps of a repeat that count."""
    return _ROW - 2 if lag else 1


class _StepEnds(Listener):
    """When each step of a run ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def metrics(self, event: Metrics) -> None:
        self.times.append(time.perf_counter())


@asynccontextmanager
async def steps_of_a_run(workload: Workload, model: Path, run: Path, *, lag: int) -> AsyncIterator[Once]:
    """A controller that takes a step of its loop at a time, or with a lag a row of steps."""
    ends = _StepEnds()
    async with launched(run_config(workload, model, run, lag=lag)) as controller:
        controller.recorder.listeners.append(ends)

        async def once(lengths: Lengths, repeat: int) -> Repeat:
            set_lengths(controller, group_lengths(workload, lengths))
            controller.config.controller.num_steps = controller.state.step + (_ROW if lag else 1)
            ends.times = [time.perf_counter()]
            await controller.reinforce()
            ends.times[-1] = time.perf_counter()  # a step has ended when it is recorded
            last = len(ends.times) - (2 if lag else 1)
            seconds = (ends.times[last] - ends.times[last - _counted(lag)]) / _counted(lag)
            amount = sum(workload.completion_lengths(lengths))
            return Repeat(seconds=seconds, amount=amount, step=controller.state.step - (1 if lag else 0))

        yield once


@asynccontextmanager
async def _trl(workload: Workload, work: Path, python: str) -> AsyncIterator[Once]:
    """`trl_floor` in a process of the environment that has TRL."""
    ours = {"PYTHONPATH", *environment.default_environment()}  # TRL's has the settings of its own libraries
    variables = {name: text for name, text in os.environ.items() if name not in ours}
    process = await asyncio.create_subprocess_exec(
        *(python, "-I", str(_PROGRAM), str(work)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=variables | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    orders, answers = process.stdin, process.stdout
    assert orders is not None and answers is not None

    async def answer() -> str:
        if not (line := await answers.readline()):
            raise RuntimeError(f"trl_floor: its process ended ({await process.wait()})")
        return line.decode().strip()

    try:
        await answer()

        async def once(lengths: Lengths, repeat: int) -> Repeat:
            orders.write(b"\n")
            return Repeat(seconds=float(await answer()), amount=sum(workload.completion_lengths(lengths)))

        yield once
    finally:
        orders.close()
        try:
            await asyncio.wait_for(process.wait(), 10.0)
        except TimeoutError:
            process.kill()
            await process.wait()

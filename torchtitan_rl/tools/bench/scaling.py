"""Seconds of a step of reinforcement as its groups grow in number, and processor seconds of the controller's process.

A controller on actors takes steps of its own loop; each round has a step of every number of groups. There is no floor:
a step is compared with that of the fewest groups.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from torchtitan_rl.tools.bench.controlled import launched, run_config, set_lengths
from torchtitan_rl.tools.bench.measurement import OURS, Repeat, interval
from torchtitan_rl.tools.bench.side import Once, opened
from torchtitan_rl.tools.bench.workload import Workload

__all__ = ["NUM_GROUPS", "TOKENS", "ScaleMeasurement", "measure_scale"]

NUM_GROUPS = (2, 4, 8, 16, 32, 64)
TOKENS = 32
"""Of each completion."""


@dataclass(kw_only=True, slots=True)
class ScaleMeasurement:
    """Steps of one run by their number of groups. Repeat i of every number was made in the same round."""

    name: str
    steps: dict[int, list[Repeat]]
    """Number of groups -> repeats, the fewest groups first."""

    def growth(self, num_groups: int) -> list[float]:
        """Of each round, how many times as long a step takes as one of the fewest groups."""
        fewest = next(iter(self.steps.values()))
        return [step.seconds / small.seconds for step, small in zip(self.steps[num_groups], fewest, strict=True)]

    def as_data(self) -> dict[str, Any]:
        steps = {
            num_groups: {
                "median_s": median(repeat.seconds for repeat in repeats),
                "seconds": [repeat.seconds for repeat in repeats],
                "controller_cpu_s": [repeat.cpu_s for repeat in repeats],
                "growth": self.growth(num_groups),
            }
            for num_groups, repeats in self.steps.items()
        }
        return {"name": self.name, "steps": steps}

    def lines(self) -> list[str]:
        """The measurement for a person."""
        fewest = next(iter(self.steps))
        lines = [self.name]
        for num_groups, repeats in self.steps.items():
            seconds, cpu_s = median(step.seconds for step in repeats), median(step.cpu_s for step in repeats)
            low, high = interval(growth := self.growth(num_groups))
            lines.append(
                f"  {num_groups:3} groups  {seconds:7.3f} s, {1e3 * seconds / num_groups:6.1f} ms a group; "
                f"{num_groups // fewest:2} times the groups take {median(growth):5.2f} ({low:.2f} to {high:.2f}) times "
                f"the seconds; processor time of the controller {1e3 * cpu_s / num_groups:6.2f} ms a group"
            )
        return lines


def measure_scale(workload: Workload, repeats: int, scratch: Path, note: Callable[[str], None]) -> ScaleMeasurement:
    """Of a workload whose prompts are the largest of `NUM_GROUPS`."""
    model = scratch / "model"
    workload.write_model(model)
    note("starting trainer, generator, store and controller")
    steps: dict[int, list[Repeat]] = {num_groups: [] for num_groups in NUM_GROUPS}
    with opened({OURS: partial(_ours, workload, model, scratch / "run")}, scratch / "logs") as (side,):
        for repeat in range(repeats + 1):
            note(f"repeat {repeat} of {repeats}" if repeat else "warming up")
            for num_groups in NUM_GROUPS[:: -1 if repeat % 2 else 1]:
                step = side.once(num_groups, repeat)
                if repeat:
                    steps[num_groups].append(step)
    name = f"scale {workload.name} {workload.dtype}, groups of {workload.group_size} completions of {TOKENS} tokens"
    return ScaleMeasurement(name=name, steps=steps)


@asynccontextmanager
async def _ours(workload: Workload, model: Path, run: Path) -> AsyncIterator[Once]:
    async with launched(run_config(workload, model, run)) as controller:
        set_lengths(controller, [[TOKENS] * workload.group_size])

        async def once(num_groups: int, repeat: int) -> Repeat:
            controller.config.algorithm.tasks_per_step = num_groups
            controller.config.controller.num_steps = controller.state.step + 1
            began, cpu = time.perf_counter(), time.process_time()
            await controller.reinforce()
            return Repeat(
                seconds=time.perf_counter() - began,
                amount=num_groups * workload.group_size * TOKENS,
                cpu_s=time.process_time() - cpu,
            )

        yield once

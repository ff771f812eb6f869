"""Memory of a run beside what it cannot do without: a bare trainer, a bare engine, and one payload of weights.

Memory is the proportional set size of all processes together: what several of them share counts once. The run and the
bare sides are measured one after the other, so that neither shares pages of libraries with the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from torchtitan_rl.tools.bench.generation import EAGER, vllm_alone
from torchtitan_rl.tools.bench.measurement import OURS
from torchtitan_rl.tools.bench.side import OpenSide, Side, opened
from torchtitan_rl.tools.bench.stepping import steps_of_a_run
from torchtitan_rl.tools.bench.training import TORCH, bare_torch
from torchtitan_rl.tools.bench.workload import Workload

__all__ = ["MemoryMeasurement", "ProcessMemory", "measure_memory", "process_memory"]

_ACTOR_NAME = "HYPERACTOR_PROCESS_NAME"
"""The environment variable in which Monarch tells a process its name, `policy-0 @ HOST`."""
_EVERY_S = 0.2
"""Between two looks at all processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Bytes of a process's proportional set size by what they are of."""

    name: str
    """Of an actor's process its rank's, such as `policy-0`; of any other one the side's."""
    private: int
    """Of the process's own memory."""
    shared: int
    """Of shared memory, such as published weights."""
    files: int
    """Of mapped files: programs and libraries."""

    @property
    def total(self) -> int:
        return self.private + self.shared + self.files


@dataclass(kw_only=True, slots=True)
class MemoryMeasurement:
    """The processes of a run, and those of the bare sides, at the moment when they had most together."""

    name: str
    run: list[ProcessMemory]
    bare: list[ProcessMemory]
    payload: int
    """Bytes of the weights in the generators' dtype."""

    @property
    def ratio(self) -> float:
        """Bytes of the run over those of bare trainer, bare engine and payload: 1 is as much, 2 twice as much."""
        return sum(process.total for process in self.run) / (sum(process.total for process in self.bare) + self.payload)

    def as_data(self) -> dict[str, Any]:
        sides = {
            side: [{"name": p.name, "private": p.private, "shared": p.shared, "files": p.files} for p in processes]
            for side, processes in ((OURS, self.run), (_BARE, self.bare))
        }
        return {"name": self.name, "sides": sides, "payload": self.payload, "ratio": self.ratio}

    def lines(self) -> list[str]:
        """The measurement for a person."""
        lines = [self.name]
        for side, processes in ((OURS, self.run), (_BARE, self.bare)):
            private, shared, files = (
                sum(getattr(process, kind) for process in processes) / 2**20 for kind in ("private", "shared", "files")
            )
            each = ", ".join(f"{process.name} {process.total / 2**20:,.0f}" for process in processes)
            lines.append(
                f"  {side}: {private + shared + files:,.0f} MiB at most (own {private:,.0f}, shared {shared:,.0f}, "
                f"files {files:,.0f}); processes {each}"
            )
        lines.append(f"  payload: {self.payload / 2**20:,.0f} MiB")
        lines.append(f"  {OURS} / ({_BARE} + payload), by memory: {self.ratio:.2f}")
        return lines


_BARE = f"{TORCH} and {EAGER}"


def measure_memory(workload: Workload, repeats: int, scratch: Path, note: Callable[[str], None]) -> MemoryMeasurement:
    """A run of `repeats` + 1 steps, then as many steps of both bare sides."""
    model = scratch / "model"
    workload.write_model(model)
    dtype: torch.dtype = getattr(torch, workload.dtype)
    run: dict[str, OpenSide] = {OURS: partial(steps_of_a_run, workload, model, scratch / "run", lag=0)}
    bare: dict[str, OpenSide] = {
        TORCH: partial(bare_torch, workload, model),
        EAGER: partial(vllm_alone, workload, model, eager=True),
    }
    return MemoryMeasurement(
        name=f"memory {workload.name} {workload.dtype}",
        run=_most(run, repeats, scratch / "logs-run", note),
        bare=_most(bare, repeats, scratch / "logs-bare", note),
        payload=workload.shape.num_parameters * dtype.itemsize,
    )


def _most(sides: dict[str, OpenSide], repeats: int, logs: Path, note: Callable[[str], None]) -> list[ProcessMemory]:
    """The processes of the sides at the moment when they had most, the largest first."""
    note(f"starting {', '.join(sides)}")
    with opened(sides, logs) as processes, _watched(processes) as most:
        for repeat in range(repeats + 1):
            note(f"{', '.join(sides)}: step {repeat + 1} of {repeats + 1}")
            for side in processes:
                side.once("skewed", repeat)
    return sorted(most, key=lambda process: -process.total)


@contextmanager
def _watched(sides: Sequence[Side]) -> Iterator[list[ProcessMemory]]:
    """A list that holds, at the end, what the processes of the sides had when they had most. Raises what stopped the
    watch before its end."""
    most: list[ProcessMemory] = []
    failures: list[Exception] = []
    ended = threading.Event()

    def watch() -> None:
        try:
            look_until_ended()
        except Exception as error:
            failures.append(error)

    def look_until_ended() -> None:
        while not ended.wait(_EVERY_S):
            now = [
                memory
                for side in sides
                for process in side.processes()
                if (memory := process_memory(process, side.name))
            ]
            if sum(memory.total for memory in now) > sum(memory.total for memory in most):
                most[:] = now

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield most
    finally:
        ended.set()
        thread.join()
    if failures:
        raise failures[0]


def process_memory(process: psutil.Process, side: str) -> ProcessMemory | None:
    """The proportional set size of a process of a side; None where it has ended."""
    kinds: dict[str, int] = {}
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        actor = process.environ().get(_ACTOR_NAME)
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):
        return None
    for line in lines:
        kind, kilobytes, _ = line.split()
        kinds[kind.removesuffix(":")] = int(kilobytes) * 2**10
    name = side if actor is None else actor.partition(" ")[0]
    return ProcessMemory(name=name, private=kinds["Pss_Anon"], shared=kinds["Pss_Shmem"], files=kinds["Pss_File"])

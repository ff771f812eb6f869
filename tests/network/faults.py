"""What networks and hosts do to a run of 20 steps, and what the run does then: one function per fault.

Each makes a bed, starts a run, does the harm, checks the promise with its deadline, and checks that nothing is left.
It returns figures; AssertionError says which promise was broken, with the output of the hosts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.network.bed import Bed
from tests.network.runs import LAYOUTS, SHORT, Run

__all__ = ["FAULTS", "NAMED_S", "ENDED_S", "run_of"]

NAMED_S = 20.0
"""Seconds from a partition for good until the host behind it is named."""
ENDED_S = 60.0
"""Seconds from then until everything has ended, on both sides."""
_RUN_S = 420.0
_SLOW_RUN_S = 900.0
"""7 MB a step between two hosts, at 1.1 MB/s, with round trips of 100 ms: 15 s a step."""
OPTIONS = {"own_cores": True}
"""Options of every bed that is made here."""
_LARGE_BATCH = ("--algorithm.tasks-per-step", "64", "--algorithm.group-size", "16")
"""With it 20 steps take longer than a host to come back, also where another replica goes on generating."""
COMPARED = ("reward/mean", "loss/mean", "optim/grad_norm")


@contextmanager
def run_of(layout: str, directory: Path, *more: str, door: str = "torchrun", bed: dict | None = None) -> Iterator[Run]:
    """A short run in a layout, in a bed of its own (`bed`: its options). At the end nothing may be left."""
    num_hosts, arguments = LAYOUTS[layout]
    with Bed(num_hosts, **OPTIONS, **(bed or {})) as hosts:
        run = Run(hosts, directory, [*SHORT, *arguments, *more], door=door)
        yield run
        run.nothing_left()
    assert hosts.left() == []


def well(run: Run, within_s: float = _RUN_S) -> dict:
    """The figures of a run that ends well."""
    statuses = run.ended(within_s)
    assert set(statuses.values()) == {0}, f"{statuses}\n{run.tail()}"
    steps = [line["time/step_s"] for line in run.lines()]
    assert len(steps) == 20
    return {"status": 0, "median_step_s": sorted(steps)[len(steps) // 2], "longest_step_s": max(steps)}


def undisturbed(directory: Path) -> dict:
    """Nothing happens: what the others are compared with."""
    with run_of("over-both", directory) as run:
        return well(run)


def slow(directory: Path) -> dict:
    """50 ms of delay and 1% of loss: the run takes longer, and computes what it computes without."""
    with run_of("over-both", directory / "fast") as run:
        fast, expected = well(run), [[line[name] for name in COMPARED] for line in run.lines()]
    with run_of("over-both", directory / "slow", bed={"delay_ms": 50, "loss": 0.01}) as run:
        figures = well(run, _SLOW_RUN_S)
        assert [[line[name] for name in COMPARED] for line in run.lines()] == expected
    return figures | {"median_step_s_without": fast["median_step_s"]}


def partition_5s(directory: Path) -> dict:
    """Host 1 cannot be reached for 5 s: the run goes on when it can."""
    with run_of("over-both", directory) as run:
        run.until_step(5)
        run.bed.hosts[1].disconnect()
        time.sleep(5)
        run.bed.hosts[1].connect()
        return well(run)


def partition(directory: Path, door: str = "torchrun") -> dict:
    """Host 1 cannot be reached for 5 s, then the run goes on; then not any more: it is named, and everything ends on
    both sides."""
    with run_of("over-both", directory, door=door) as run:
        run.until_step(3)
        run.bed.hosts[1].disconnect()
        time.sleep(5)
        run.bed.hosts[1].connect()
        run.until_step(len(run.lines()) + 3, 60)
        run.bed.hosts[1].disconnect()
        named = run.until(lambda: re.search(r"error: .*host 10\.77\.0\.2", run.text()), NAMED_S, "host 1 is named")
        began = time.monotonic()
        statuses = run.ended(ENDED_S)
        assert all(status > 0 for status in statuses.values()), f"{statuses}\n{run.tail()}"
        run.nothing_left(ENDED_S)
        return {"named_s": named, "ended_s": time.monotonic() - began, "statuses": statuses}


def partition_workers(directory: Path) -> dict:
    """The same with workers started by hand: the worker behind the partition ends what it had started by itself."""
    return partition(directory, door="workers")


def _rejoined(run: Run, index: int) -> bool:
    return bool(re.search(rf"generator-{index}: replaced after", run.text()))


def generator_host(directory: Path, layout: str = "one-and-two", more: Sequence[str] = _LARGE_BATCH) -> dict:
    """The host of a generator loses its power and comes back after 3 s: a replica starts on it again."""
    with run_of(layout, directory, *more, door="workers") as run:
        run.until_step(2)
        host = run.bed.hosts[1]
        host.kill()
        time.sleep(3)
        began = time.monotonic()
        host.start()
        run.start_worker(1)
        run.until(lambda: _rejoined(run, 0), 120, "generator-0 is replaced")
        back = time.monotonic() - began
        return well(run) | {"rejoined_s": back, "processes_there": len(host.processes())}


def only_generator_host(directory: Path) -> dict:
    """The same where no other host generates: the run waits for the host."""
    return generator_host(directory, layout="one-each", more=())


FAULTS: dict[str, Callable[[Path], dict]] = {
    "undisturbed": undisturbed,
    "slow": slow,
    "partition-5s": partition_5s,
    "partition": partition,
    "partition-workers": partition_workers,
    "generator-host": generator_host,
    "only-generator-host": only_generator_host,
}

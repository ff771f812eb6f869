"""Whole runs of the controller on a virtual clock, with five faults each: docs/dev/simulator.md."""

import asyncio
import time

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.properties import PROPERTIES, broken
from tests.simulation.run import simulate
from tests.simulation.tasks import config_of
from tests.simulation.virtual_clock import Stuck, VirtualLoop
from torchtitan_rl.validation.run import validate

BLOCK, NUM_BLOCKS = 20, 5
MOST_SEEDS = 6
"""A fault that is put back is caught by one of so many seeds."""


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_no_property_is_broken(block):
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        found = broken(simulate(seed))
        assert not found, "\n".join(found.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_that_is_put_back_is_caught(name):
    mutant = MUTANTS[name]
    assert mutant.caught_by in PROPERTIES
    for seed in range(mutant.first_seed, mutant.first_seed + MOST_SEEDS):  # without the fault: the test above
        with mutant.put_back():
            found = broken(simulate(seed))
        if mutant.caught_by in found:
            assert f"seed={seed}: {mutant.caught_by}: " in found[mutant.caught_by]
            return
    pytest.fail(f"{name}: {mutant.caught_by} holds for {MOST_SEEDS} seeds")


def test_the_config_of_a_seed_is_one_that_a_run_accepts(tmp_path):
    for seed in range(20):
        validate(config_of(seed, tmp_path))


def test_a_seed_repeats_its_run():
    one, other = simulate(3), simulate(3)
    assert one.history == other.history and len(one.history) > 100
    assert simulate(4).history != one.history


def test_the_clock_jumps_and_a_wait_without_an_end_is_an_error():
    loop = VirtualLoop(now=5.0, limit_s=10_000.0)

    async def waits():
        await asyncio.sleep(1000)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.create_future(), 60)
        assert await asyncio.to_thread(max, 1, 2) == 2
        return loop.time()

    began = time.perf_counter()
    assert loop.run_until_complete(waits()) == pytest.approx(1065, abs=0.01)
    assert time.perf_counter() - began < 5
    with pytest.raises(Stuck, match="no timer is set at 1065"):
        loop.run_until_complete(loop.create_future())
    with pytest.raises(Stuck, match="not over after 10000 virtual seconds"):
        loop.run_until_complete(asyncio.sleep(20_000))
    loop.run_to_the_end()

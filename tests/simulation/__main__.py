"""`scripts/simulate.sh`: simulates many seeds, or one with its history."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import sys
import time
import traceback
from contextlib import nullcontext
from functools import partial

import torch

from tests.simulation.mutants import MUTANTS
from tests.simulation.properties import broken
from tests.simulation.run import simulate

_COLLECT_EVERY = 8  # seeds


def _one(seed: int, mutant: str = "") -> tuple[int, int, int, dict[str, str]]:
    """(seed, attempts, faults that struck, broken properties)."""
    torch.set_num_threads(1)
    if seed % _COLLECT_EVERY == 0:
        gc.collect()
    with MUTANTS[mutant].put_back() if mutant else nullcontext():
        run = simulate(seed)
    return seed, len(run.logs), sum(log.num_faults for log in run.logs), broken(run)


def _collect_seldom() -> None:
    """What is imported stays, and what a seed leaves goes with that of later seeds."""
    gc.freeze()
    gc.disable()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/simulate.sh", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this seed alone, with its history")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--mutant", default="", choices=["", *MUTANTS], help="a fault to put back")
    options = parser.parse_args()
    if options.seed is not None:
        with MUTANTS[options.mutant].put_back() if options.mutant else nullcontext():
            run = simulate(options.seed)
        print("\n".join(run.history))
        if run.log.error is not None:
            traceback.print_exception(run.log.error)
        found = broken(run)
        print("\n".join(found.values()) or f"seed {options.seed}: no property broken")
        return bool(found)
    began, failed, num_attempts, num_faults = time.perf_counter(), 0, 0, 0
    seeds = range(options.first, options.first + options.seeds)
    with multiprocessing.Pool(options.processes, _collect_seldom) as pool:
        for _, of_attempts, faults, found in pool.imap(partial(_one, mutant=options.mutant), seeds, chunksize=8):
            num_attempts, num_faults, failed = num_attempts + of_attempts, num_faults + faults, failed + bool(found)
            for said in found.values():
                print(said, flush=True)
        pool.close()
        pool.join()
    seconds, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{options.seeds} seeds, {num_attempts} attempts, {num_faults} faults that struck, {seconds:.0f} s "
        f"({used.ru_utime + used.ru_stime:.0f} s of processor time): "
        f"{failed} seeds break a property"
    )
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

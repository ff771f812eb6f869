"""What processes hold, and the ratio, by hand."""

import os
import subprocess
import sys

from torchtitan_rl.tools.bench.memory_use import MemoryMeasurement, ProcessMemory, process_memory

MIB = 2**20


def process(private: int, shared: int, files: int) -> ProcessMemory:
    return ProcessMemory(private=private * MIB, shared=shared * MIB, files=files * MIB)


def test_the_ratio_is_of_all_processes_to_the_bare_ones_and_a_payload():
    run, bare = [process(500, 60, 40), process(100, 0, 20)], [process(300, 0, 60), process(200, 0, 30)]
    measured = MemoryMeasurement(name="memory", run=run, bare=bare, payload=10 * MIB)
    assert measured.ratio == 720 / 600
    assert measured.lines() == [
        "memory",
        "  ours: 720 MiB at most (own 600, shared 60, files 60); processes 600, 120",
        "  bare torch and vLLM eager: 590 MiB at most (own 500, shared 0, files 90); processes 360, 230",
        "  payload: 10 MiB",
        "  ours / (bare torch and vLLM eager + payload), by memory: 1.20",
    ]
    assert measured.as_data()["sides"]["ours"][1] == {"private": 100 * MIB, "shared": 0, "files": 20 * MIB}


def test_what_a_process_allocates_is_its_own():
    before = process_memory(os.getpid()).private
    block = b"x" * (50 * MIB)
    assert 45 * MIB < process_memory(os.getpid()).private - before < 60 * MIB and len(block) == 50 * MIB


def test_a_process_that_has_ended_holds_nothing():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert process_memory(ended.pid) is None

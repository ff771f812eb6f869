"""What processes hold, and the ratio, by hand."""

import mmap
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from torchtitan_rl.tools.bench import memory_use
from torchtitan_rl.tools.bench.memory_use import MemoryMeasurement, ProcessMemory, process_memory

MIB = 2**20


def process(name: str, private: int, shared: int, files: int) -> ProcessMemory:
    return ProcessMemory(name=name, private=private * MIB, shared=shared * MIB, files=files * MIB)


def test_the_ratio_is_of_all_processes_to_the_bare_ones_and_a_payload():
    run = [process("policy-0", 500, 60, 40), process("ours", 100, 0, 20)]
    bare = [process("torch", 300, 0, 60), process("vLLM", 200, 0, 30)]
    measured = MemoryMeasurement(name="memory", run=run, bare=bare, payload=10 * MIB)
    assert measured.ratio == 720 / 600
    assert measured.lines() == [
        "memory",
        "  ours: 720 MiB at most (own 600, shared 60, files 60); processes policy-0 600, ours 120",
        "  bare torch and vLLM eager: 590 MiB at most (own 500, shared 0, files 90); processes torch 360, vLLM 230",
        "  payload: 10 MiB",
        "  ours / (bare torch and vLLM eager + payload), by memory: 1.20",
    ]
    assert measured.as_data()["sides"]["ours"][1] == {
        "name": "ours",
        "private": 100 * MIB,
        "shared": 0,
        "files": 20 * MIB,
    }


def test_what_a_process_allocates_is_its_own():
    before = process_memory(psutil.Process(), "ours").private
    # Pages of its own: a process that has freed as much takes `bytes` from there.
    with mmap.mmap(-1, 50 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for _ in range(50):
            block.write(b"x" * MIB)
        assert 45 * MIB < process_memory(psutil.Process(), "ours").private - before < 60 * MIB


def test_a_process_that_has_ended_holds_nothing():
    ended = psutil.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert process_memory(ended, "ours") is None


def test_a_watch_that_stops_before_its_end_says_why(monkeypatch):
    asked = threading.Event()

    def unreadable(process, side):
        asked.set()
        raise PermissionError("smaps_rollup")

    monkeypatch.setattr(memory_use, "process_memory", unreadable)
    side = SimpleNamespace(name="ours", processes=lambda: [psutil.Process()])
    with pytest.raises(PermissionError, match="smaps_rollup"), memory_use._watched([side]):
        assert asked.wait(10)

"""A call to a process of this machine that ends is not left to the silence that Monarch would wait for."""

import asyncio
import subprocess
import sys
import time

import pytest

from torchtitan_rl.actors.operations import GeneratorOperations
from torchtitan_rl.dispatch.role_mesh import ProcessDied, RoleMesh


class Silent:
    """Actors that never answer."""

    def flatten(self, name):
        return self

    def slice(self, rank):
        return self

    @property
    def probe(self):
        return self

    def call_one(self):
        return asyncio.sleep(60)


@pytest.mark.parametrize("collected", [False, True], ids=["a zombie", "gone"])
async def test_the_end_of_a_process_ends_its_calls(collected):
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
    mesh = RoleMesh("generator-0", Silent(), num_ranks=2, tensor_parallel_size=2, timeout_s=60)
    mesh.pids = [process.pid for process in processes]
    try:
        call = mesh.call_each(GeneratorOperations.probe)
        await asyncio.sleep(0.7)
        assert not call.done()
        processes[1].kill()
        if collected:
            processes[1].wait()
        began = time.monotonic()
        with pytest.raises(ProcessDied, match="^generator-0-1.probe: its process died; see its log$"):
            await call
        assert time.monotonic() - began < 5
    finally:
        for process in processes:
            process.kill()
            process.wait()

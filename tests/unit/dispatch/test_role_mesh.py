"""A call to a process of this machine that ends is not left to the silence that Monarch would wait for."""

import asyncio
import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_rl.actors.operations import GeneratorOperations
from torchtitan_rl.dispatch import role_mesh
from torchtitan_rl.dispatch.role_mesh import NoAnswer, ProcessDied, RoleMesh


class Silent:
    """Actors that never answer."""

    def flatten(self, name):
        return self

    def slice(self, rank):
        return self

    @property
    def probe(self):
        return self

    sample = pid = probe

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


@pytest.mark.parametrize("code, has_ended", [(errno.EMFILE, False), (errno.ENOENT, True), (errno.ESRCH, True)])
def test_a_process_that_cannot_be_looked_at_has_not_ended(monkeypatch, code, has_ended):
    """Out of descriptors a controller took each of its workers for dead."""

    def fails(path, *args, **kwargs):
        raise OSError(code, os.strerror(code))

    assert not role_mesh._has_ended(os.getpid())
    monkeypatch.setattr(Path, "read_text", fails)
    assert role_mesh._has_ended(os.getpid()) is has_ended


@pytest.mark.parametrize(
    "operation, setting",
    [(GeneratorOperations.probe, "generator.hang_timeout_s"), (GeneratorOperations.sample, "controller.*_timeout_s")],
)
async def test_a_deadline_that_has_passed_names_its_setting(monkeypatch, operation, setting):
    monkeypatch.setattr(role_mesh, "_BLAME_S", 0.01)
    mesh = RoleMesh("generator-0", Silent(), num_ranks=1, tensor_parallel_size=1, timeout_s=60)
    with pytest.raises(NoAnswer) as caught:
        await mesh.call_leader(operation, timeout_s=0.01)
    assert str(caught.value) == (
        f"generator-0-0.{operation.__name__}: no answer within 0.01 s; look at its log, or raise the deadline in "
        + setting
    )

"""Hosts for sandboxes: `SandboxConfig.open` uses those of its event loop's run, and no other."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from torchtitan_rl.tasks.sandbox import registry
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.tasks.sandbox.plain import Plain


class Elsewhere:
    """A host that notes what is written."""

    def __init__(self):
        self.asked, self.files = [], {}

    @asynccontextmanager
    async def opened(self, config, *, gateway):
        self.asked.append((config, gateway))
        yield self

    async def write(self, files):
        self.files |= files


async def test_a_sandbox_opens_on_the_hosts_of_its_loops_run_until_they_are_taken_back():
    hosts, config = Elsewhere(), SandboxConfig()
    registry.register(hosts)
    with pytest.raises(RuntimeError, match="another run of this event loop"):
        registry.register(Elsewhere())
    async with config.open({"a": b"1"}, gateway="http://127.0.0.1:5/v1") as sandbox:
        assert sandbox is hosts
    assert hosts.asked == [(config, "http://127.0.0.1:5/v1")] and hosts.files == {"a": b"1"}

    async def in_a_thread():
        async with config.open() as sandbox:
            return type(sandbox)

    assert await asyncio.to_thread(asyncio.run, in_a_thread()) is Plain  # a loop of its own
    registry.unregister(hosts)
    async with config.open({"a": b"1"}) as sandbox:
        assert isinstance(sandbox, Plain) and await sandbox.read("a") == b"1"
    registry.unregister(hosts)  # a launcher that stops twice

"""Which host a sandbox is opened on, and what is counted there."""

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from torchtitan_rl.dispatch.sandbox_hosts import OwnHost, RunHosts
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.tasks.sandbox.sandbox import SandboxError

SMALL = SandboxConfig(kind="bubblewrap", memory_gib=0.25)


@dataclass
class Host:
    """A host without sandboxes, which notes for whom one is opened."""

    address: str
    num_cores: int = 4
    free_bytes: int = 2**36
    is_lost: bool = False
    refuses: str = ""
    gateways: list = field(default_factory=list)

    @asynccontextmanager
    async def opened(self, config, *, gateway):
        if self.refuses:
            raise SandboxError(self.refuses)
        self.gateways.append(gateway)
        yield self.address


async def opened(hosts, number, config=SMALL, gateway=""):
    """The host of each of several sandboxes that are open at once, and the counts meanwhile."""
    async with AsyncExitStack() as stack:
        places = [await stack.enter_async_context(hosts.opened(config, gateway=gateway)) for _ in range(number)]
        return places, hosts.num_running()


async def test_sandboxes_spread_and_their_places_are_free_again():
    hosts = RunHosts(Host("this host", num_cores=2), [Host("a"), Host("b")])
    for _ in range(2):  # the second time as the first
        places, counts = await opened(hosts, 10, gateway="http://127.0.0.1:5/v1")
        assert counts == {"a": 4, "b": 4, "this host": 2} and places[:2] == ["a", "b"]
        assert set(hosts.num_running().values()) == {0}
    assert hosts.own.gateways == ["http://127.0.0.1:5/v1"] * 4


async def test_a_host_that_is_lost_or_has_no_memory_gets_none():
    hosts = RunHosts(Host("this host"), [Host("a", is_lost=True), Host("b", free_bytes=2**20)])
    assert await opened(hosts, 3) == (["this host"] * 3, {"this host": 3})


async def test_a_command_that_has_its_hosts_network_stays_where_the_gateway_is():
    hosts = RunHosts(Host("this host"), [Host("a")])
    plain = SandboxConfig(kind="none")
    assert (await opened(hosts, 3, plain, "http://127.0.0.1:5/v1"))[0] == ["this host"] * 3
    assert (await opened(hosts, 3, plain))[0] == ["a", "this host", "a"]


async def test_a_sandbox_that_does_not_start_is_not_counted():
    hosts = RunHosts(Host("this host"), [Host("a", refuses="sandbox: did not start")])
    with pytest.raises(SandboxError, match="did not start"):
        await opened(hosts, 1)
    assert hosts.num_running() == {"a": 0}


async def test_the_controllers_own_host_opens_them_in_this_process():
    own = OwnHost(num_cores=2)
    async with own.opened(SandboxConfig(), gateway="") as sandbox:
        await sandbox.write({"a": b"1"})
        assert await sandbox.read("a") == b"1"
    assert own.free_bytes > 2**20 and not own.is_lost

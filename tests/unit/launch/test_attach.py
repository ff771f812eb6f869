"""Asking workers where their Monarch listens, while one of them begins anew; hosts that cannot join a run."""

import itertools
import socket
import struct
import threading
from contextlib import suppress

import pytest

from torchtitan_rl.launch.attach import Hosts, _monarchs
from torchtitan_rl.launch.inventory import Host


@pytest.fixture
def worker():
    """Starts a server that cuts off so many connections, and answers the next one as a worker does."""
    servers = []

    def start(num_resets: int) -> str:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve() -> None:
            for number in itertools.count():
                with suppress(OSError):  # a connection that only looks whether somebody listens is closed by then
                    connection, _ = server.accept()
                    with connection:
                        if number < num_resets:  # closed with a reset in place of an end
                            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        else:
                            connection.sendall(b"tcp://127.0.0.1:7\n")
                            connection.recv(4096)
                            connection.sendall(b"+")
                if server.fileno() < 0:
                    return

        threading.Thread(target=serve, daemon=True).start()
        return f"tcp://127.0.0.1:{server.getsockname()[1]}"

    yield start
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


async def test_a_worker_whose_old_program_cuts_a_connection_off_is_asked_again(worker):
    assert await _monarchs([worker(num_resets=3)], timeout_s=10) == ["tcp://127.0.0.1:7"]


async def test_who_cuts_off_every_connection_is_no_worker(worker):
    # The message depends on whether the last connection was cut off before or after it was there.
    with pytest.raises(RuntimeError, match=r"no worker .*(reset|Errno 104)"):
        await _monarchs([worker(num_resets=10**6)], timeout_s=1)


@pytest.mark.parametrize(
    "worker, own, expected",
    [
        (
            "tcp://10.0.0.2:1",
            "",
            "hosts=tcp://10.0.0.2:1: the run's processes listen on this machine alone, or are a job",
        ),
        ("tcp://10.0.0.1:1", "10.0.0.9", "hosts=tcp://10.0.0.1:1: is a host of the run already"),
        ("10.0.0.2:1", "10.0.0.9", "hosts='10.0.0.2:1': is not the address of a worker; write tcp://HOST:PORT"),
        ("tcp://127.0.0.2:1", "10.0.0.9", "hosts=tcp://127.0.0.2:1: resolves to 127.0.0.2, the loopback of this host"),
    ],
)
async def test_a_host_that_the_others_do_not_reach_does_not_join(worker, own, expected):
    hosts = Hosts(mesh=None, hosts=[Host(address="10.0.0.1:1", num_cores=1)], attached=True, own=own)
    with pytest.raises(ValueError, match=expected):
        await hosts.join(worker, 1.0, lambda index, seconds: None)
    assert hosts.present() == [0] and hosts.leases == {}


async def test_nobody_at_the_address_of_a_host_that_is_to_join():
    hosts = Hosts(mesh=None, hosts=[Host(address="127.0.0.1:1", num_cores=1)], attached=True, own="127.0.0.1")
    with pytest.raises(RuntimeError, match="hosts: no worker answers at tcp://127.0.0.2:9 within 0.1 s"):
        await hosts.join("tcp://127.0.0.2:9", 0.1, lambda index, seconds: None)
    assert hosts.present() == [0]

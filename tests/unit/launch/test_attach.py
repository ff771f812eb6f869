"""Asking workers where their Monarch listens, while one of them begins anew."""

import itertools
import socket
import struct
import threading
from contextlib import suppress

import pytest

from torchtitan_rl.launch.attach import _monarchs


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

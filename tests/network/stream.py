"""One TCP stream: `stream.py receive ADDRESS` prints its port, then, when the stream has ended, bytes and seconds;
`stream.py send ADDRESS PORT BYTES` sends zeros. Needs the standard library only."""

from __future__ import annotations

import socket
import sys
import time

_CHUNK = 1 << 20


def receive(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        buffer, num_bytes, began = bytearray(_CHUNK), 0, time.perf_counter()
        while got := connection.recv_into(buffer):
            num_bytes += got
        print(num_bytes, time.perf_counter() - began, flush=True)


def send(address: str, port: int, num_bytes: int) -> None:
    with socket.create_connection((address, port)) as connection:
        chunk = bytes(min(_CHUNK, num_bytes))
        for start in range(0, num_bytes, len(chunk)):
            connection.sendall(chunk[: num_bytes - start])


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

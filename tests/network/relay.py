"""A cable with delay and loss, for kernels without netem: carries frames between a TAP device of a host and one of the
bed's switch. `python -m tests.network.relay HOST_PID SWITCH_PID PORT DELAY_MS JITTER_MS LOSS SEED` runs until its
standard input ends.

Delay and loss act on frames that leave the host, so that a frame between two hosts meets them once. Frames stay in
order. TAP devices know no segmentation offload: what is lost is one frame of the device's MTU, as on a real cable.
"""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import struct
import sys
import time
from collections import deque

from tests.network.namespaces import entered

__all__ = ["main"]

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME_BYTES = 65_600
_MOST_UNDERWAY = 10_000
"""Frames under way; what comes beyond is lost, as in a full queue."""


def tap(name: str) -> int:
    """A TAP device in this process's network namespace; it goes when the descriptor is closed."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def main(host_pid: int, switch_pid: int, port: str, delay_s: float, jitter_s: float, loss: float, seed: int) -> None:
    host = entered(host_pid, "net", lambda: tap("eth0"))
    switch = entered(switch_pid, "net", lambda: tap(port))
    print("ready", flush=True)
    chance, underway = random.Random(seed), deque()
    selector = selectors.DefaultSelector()
    for fd in (host, switch, sys.stdin.fileno()):
        selector.register(fd, selectors.EVENT_READ)
    while True:
        wait = max(0.0, underway[0][0] - time.monotonic()) if underway else None
        for key, _ in selector.select(wait):
            if key.fd == host:
                for frame in _frames(host):
                    if len(underway) < _MOST_UNDERWAY and chance.random() >= loss:
                        due = time.monotonic() + delay_s + chance.uniform(-jitter_s, jitter_s)
                        underway.append((max(due, underway[-1][0]) if underway else due, frame))
            elif key.fd == switch:
                for frame in _frames(switch):
                    _write(host, frame)
            elif not os.read(key.fd, 1):
                return
        while underway and underway[0][0] <= time.monotonic():
            _write(switch, underway.popleft()[1])


def _frames(fd: int):
    for _ in range(64):  # then the other direction has its turn
        try:
            yield os.read(fd, _FRAME_BYTES)
        except OSError:  # none is there, or the device is down
            return


def _write(fd: int, frame: bytes) -> None:
    try:
        os.write(fd, frame)
    except OSError:
        pass  # the device is down, or its queue is full: the frame is lost


if __name__ == "__main__":
    host_pid, switch_pid, port, delay_ms, jitter_ms, loss, seed = sys.argv[1:]
    main(int(host_pid), int(switch_pid), port, float(delay_ms) / 1e3, float(jitter_ms) / 1e3, float(loss), int(seed))

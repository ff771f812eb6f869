"""A host joins a run that goes on: `python -m torchtitan_rl.launch.join RUN`, once on each host of a job.

Starts the host's worker, and asks the run through its directory to take the host. Ends when the run has let go of the
host, or has ended. SIGTERM, or USR1 before a time limit, makes the host leave in order: its replicas answer the
requests that they have, for as long as the signal leaves time, and other replicas answer the rest.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from torchtitan_rl.environment import HOST_ADDRESS, end_with_parent
from torchtitan_rl.launch.addresses import split
from torchtitan_rl.launch.children import end_children, free_port, start_module
from torchtitan_rl.launch.liveness import JOIN_S
from torchtitan_rl.launch.liveness.lease import ask_to_leave, until_released
from torchtitan_rl.launch.request import check_going_on, request
from torchtitan_rl.record import replica_request

__all__ = ["main"]

_LOOK_EVERY_S = 0.2
_AFTER_TERM_S = 12.0
"""Seconds after SIGTERM that replicas go on answering: a scheduler kills after 30, and the run needs some to let go."""
_TO_LET_GO_S = 15.0
"""Seconds for the run to let go of a host whose replicas have no time left."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main(arguments: list[str]) -> int:
    """Returns 0 once the host has left or the run has ended, 1 with an error where it did not join or was lost."""
    parser = argparse.ArgumentParser(prog="python -m torchtitan_rl.launch.join", description=__doc__)
    parser.add_argument("run", type=Path, help="the directory of a run that goes on")
    parser.add_argument(
        "--leave-within",
        type=float,
        default=90.0,
        metavar="SECONDS",
        help="how long replicas go on answering after USR1 (default: %(default)g)",
    )
    parser.add_argument("--timeout-s", type=float, default=600.0, help="how long to wait until its replicas serve")
    args = parser.parse_args(arguments)
    end_with_parent(signal.SIGKILL)
    leaving = _Leaving(args.leave_within)
    for number in _SIGNALS:
        signal.signal(number, leaving.ask)
    children: list[subprocess.Popen] = []
    try:
        return _join(args.run, args.timeout_s, leaving, children)
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        end_children(children)


class _Leaving:
    """When the host has to leave: after the first signal, or sooner after a later one."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self.at: float | None = None
        """By `time.monotonic`; None: nobody has asked for it."""

    def ask(self, number: int, _frame) -> None:
        within_s = self._within_s if number == signal.SIGUSR1 else min(self._within_s, _AFTER_TERM_S)
        at = time.monotonic() + within_s
        self.at = at if self.at is None else min(self.at, at)


def _join(run: Path, timeout_s: float, leaving: _Leaving, children: list[subprocess.Popen]) -> int:
    own = os.environ.get(HOST_ADDRESS) or _address_towards(_host_of(run, leaving))
    worker = f"tcp://{own}:{free_port(own)}"
    children.append(start_module("torchtitan_rl.launch.worker", worker, ignore=_SIGNALS))
    passed_on = 0.0

    def look() -> None:
        """Passes signals on to the worker, and raises RuntimeError where it has ended."""
        nonlocal passed_on
        if children[0].poll() is not None:
            raise RuntimeError(f"host {own}: its worker has ended; its output says why")
        if leaving.at is not None and leaving.at != passed_on:
            passed_on = leaving.at
            seconds = max(0.0, leaving.at - time.monotonic())
            print(f"host {own}: leaves within {seconds:.0f} s", file=sys.stderr)
            threading.Thread(target=_pass_on, args=(worker, leaving.at), daemon=True).start()

    try:
        request(run, join=(worker,), timeout_s=timeout_s, meanwhile=look)
    except ValueError:
        if leaving.at is not None:
            return 0  # it had to leave before its replicas served
        raise
    print(f"host {own}: has joined {run}; worker {worker}", file=sys.stderr)
    released = threading.Event()
    let_go: list[bool] = []

    def wait() -> None:
        let_go.append(until_released(*split(worker)))
        released.set()

    threading.Thread(target=wait, daemon=True).start()
    while not released.wait(_LOOK_EVERY_S):
        look()
        if leaving.at is not None and time.monotonic() > leaving.at + _TO_LET_GO_S:
            print(f"host {own}: the run did not let go of it in time", file=sys.stderr)
            return 1
    if not let_go[0]:
        raise RuntimeError(f"host {own}: the run's controller is gone, or has not been heard of; nothing is left of it")
    print(f"host {own}: has left {run}", file=sys.stderr)
    return 0


def _pass_on(worker: str, leaves_at: float) -> None:
    """Asks the worker, which may still be starting, to leave. Returns once it has left, or its time is over."""
    while not ask_to_leave(*split(worker), max(0.0, leaves_at - time.monotonic())) and time.monotonic() < leaves_at:
        time.sleep(_LOOK_EVERY_S)


def _host_of(run: Path, leaving: _Leaving) -> str:
    """The address HOST:PORT of a host of the run, once the run reads requests. Raises ValueError for a run that no host
    can join, or that does not read any within `JOIN_S`."""
    until = time.monotonic() + JOIN_S
    while (hosts := replica_request.hosts_of(run)) is None:
        check_going_on(run)
        if time.monotonic() > until or leaving.at is not None:
            raise ValueError(f"run={str(run)!r}: reads no requests yet; submit again once it trains")
        time.sleep(_LOOK_EVERY_S)
    check_going_on(run)
    if not hosts:
        raise ValueError(
            f"run={str(run)!r}: its processes listen on one machine alone; begin it with --hosts and the address of a "
            "worker on each of its machines, or as a job of Slurm"
        )
    return hosts[0]


def _address_towards(host: str) -> str:
    from torchtitan_rl.launch.inventory import address_towards

    return address_towards(*split(f"tcp://{host}"))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # a thread may be waiting for the worker

"""A host's Monarch worker: `python -m torchtitan_rl.launch.worker tcp://HOST:PORT` serves a controller until the
process is ended. What it has started for a controller ends when nothing is heard of that controller for 30 s
(`launch.liveness.lease`).

There is no authentication: anybody who can connect to the port can run code on the host. Bind the port to a private
interface.
"""

from __future__ import annotations

import signal
import socket
import sys

from monarch.actor import run_worker_loop_forever

from torchtitan_rl.launch.addresses import split, worker_problem
from torchtitan_rl.launch.inventory import use_interface_of
from torchtitan_rl.launch.liveness import lease

__all__ = ["main"]


def main(address: str) -> None:
    """Runs until the process is ended. Actors of the worker inherit its environment and end with the worker. Raises
    ValueError for an address where nobody else would find the worker."""
    if problem := worker_problem(address):
        raise ValueError(problem)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller to answer
    host, port = split(address)
    use_interface_of(host)
    with socket.create_server((host, 0)) as probe:
        monarch = f"tcp://{host}:{probe.getsockname()[1]}"
    lease.serve(host, port, monarch)
    run_worker_loop_forever(ca="trust_all_connections", address=monarch)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except (IndexError, OSError, ValueError) as error:
        sys.exit(f"error: {'ADDRESS: is missing; give tcp://HOST:PORT' if len(sys.argv) < 2 else error}")

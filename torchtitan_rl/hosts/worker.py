"""A host's Monarch worker: `python -m torchtitan_rl.hosts.worker tcp://HOST:PORT` serves a controller until it is
ended.

Whoever can connect to that port can run code here: there is no authentication. Bind it to a private interface.
"""

from __future__ import annotations

import signal
import sys

from monarch.actor import run_worker_loop_forever

from torchtitan_rl.hosts.inventory import use_interface_of

__all__ = ["main"]


def main(address: str) -> None:
    """Runs until the process is ended. Actors it starts inherit its environment, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller to answer
    use_interface_of(address.removeprefix("tcp://").rpartition(":")[0])
    run_worker_loop_forever(ca="trust_all_connections", address=address)


if __name__ == "__main__":
    main(sys.argv[1])

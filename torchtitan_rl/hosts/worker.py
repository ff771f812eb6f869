"""A host's Monarch worker: `python -m torchtitan_rl.hosts.worker tcp://HOST:PORT` serves a controller until the
process is ended.

There is no authentication: anybody who can connect to the port can run code on the host. Bind the port to a private
interface.
"""

from __future__ import annotations

import signal
import sys

from monarch.actor import run_worker_loop_forever

from torchtitan_rl.hosts.inventory import use_interface_of

__all__ = ["main"]


def main(address: str) -> None:
    """Runs until the process is ended. Actors of the worker inherit its environment and end with the worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the controller to answer
    use_interface_of(address.removeprefix("tcp://").rpartition(":")[0])
    run_worker_loop_forever(ca="trust_all_connections", address=address)


if __name__ == "__main__":
    main(sys.argv[1])

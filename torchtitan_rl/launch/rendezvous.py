"""The meeting place of a mesh's ranks: a store of torch.distributed that listens on one address, and no more.

torch's own `env://` lets rank 0 listen on every interface of its host, and the store asks nobody for a key. Here rank
0's process holds a store on a socket that is bound already, and all ranks are clients of it.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch.distributed as dist
from monarch.actor import endpoint
from monarch.spmd import SPMDActor

from torchtitan_rl.launch.addresses import is_number, loopback

__all__ = ["Rendezvous"]

_STORE_S = 300.0
"""Seconds that the store waits for a key."""


class Rendezvous(SPMDActor):
    """Sets RANK, WORLD_SIZE, MASTER_ADDR and the like in every process of a mesh. Lives as long as its process."""

    @endpoint
    def listen(self, address: str) -> int:
        """Opens the store on `address`, a name or number of this host, in the process of rank 0. Returns the port.
        Raises OSError for an address that is not of this host. A name that is the loopback here, and another address on
        other hosts, opens the store on all addresses."""
        own = "" if loopback(address) and not is_number(address) else address
        family, _, _, _, place = socket.getaddrinfo(own or "0.0.0.0", 0, type=socket.SOCK_STREAM)[0]
        with socket.create_server(place[:2], family=family) as server:
            port = server.getsockname()[1]
            self.store = dist.TCPStore(
                address,
                port,
                is_master=True,
                timeout=timedelta(seconds=_STORE_S),
                wait_for_workers=False,
                master_listen_fd=server.detach(),
            )
        return port

    @endpoint
    def join(self, address: str, port: int) -> None:
        """Makes `torch.distributed` of this process a client of the store."""
        self._setup_env(address, port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch's word for a store that is there already

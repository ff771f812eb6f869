"""What runs first in the processes of a mesh.

Imports nothing that could look at a GPU before the process has been given its own.
"""

from __future__ import annotations

import os

from monarch.actor import current_rank

__all__ = ["claim_devices"]


def claim_devices(devices: list[str], environment: dict[str, str]) -> None:
    """Sets the GPUs that the mesh has on this host (`devices`, one entry per host), and what is not set of the
    environment that the controller's processes have."""
    mine = devices[dict(current_rank()).get("hosts", 0)]
    if mine:
        os.environ["CUDA_VISIBLE_DEVICES"] = mine
    for name, value in environment.items():
        os.environ.setdefault(name, value)

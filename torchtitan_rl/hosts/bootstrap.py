"""The function that runs first in each process of a mesh.

This module imports nothing that could open a GPU before `claim_devices` has set CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os

from monarch.actor import current_rank

__all__ = ["claim_devices"]


def claim_devices(devices: list[str], environment: dict[str, str]) -> None:
    """Sets CUDA_VISIBLE_DEVICES to the GPUs that the mesh has on this host (`devices`, one entry per host of the mesh),
    and each variable of `environment` that is not set."""
    mine = devices[dict(current_rank()).get("hosts", 0)]
    if mine:
        os.environ["CUDA_VISIBLE_DEVICES"] = mine
    for name, value in environment.items():
        os.environ.setdefault(name, value)

"""The function that runs first in each process of a mesh.

This module imports nothing that could open a GPU before `claim_devices` has set CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import os

from monarch.actor import current_rank

from torchtitan_rl.environment import HOST_ADDRESS

__all__ = ["claim_devices"]


def claim_devices(devices: list[str], environment: dict[str, str], addresses: list[str] | None = None) -> None:
    """Sets CUDA_VISIBLE_DEVICES to the GPUs that the mesh has on this host (`devices`, one entry per host of the mesh),
    and each variable of `environment` that is not set. `addresses`: where other hosts reach each host of the mesh; a
    host's own setting stays."""
    index = dict(current_rank()).get("hosts", 0)
    if devices[index]:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[index]
    if addresses is not None:
        os.environ.setdefault(HOST_ADDRESS, addresses[index])
    for name, value in environment.items():
        os.environ.setdefault(name, value)

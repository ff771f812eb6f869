"""Sharded tensors."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

__all__ = ["whole"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The unsharded tensor; a collective call when it is sharded."""
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()

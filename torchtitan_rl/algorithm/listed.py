"""Advantages that an estimator gives as a list, a tuple or an array of numbers."""

from __future__ import annotations

from typing import Any

import numpy
import torch

__all__ = ["from_list"]


def from_list(advantages_G: Any) -> Any:
    """A list, tuple or array of numbers as a float64 tensor; anything else as it is, for the caller to refuse."""
    if not isinstance(advantages_G, (list, tuple, numpy.ndarray)):
        return advantages_G
    try:
        return torch.tensor([float(advantage) for advantage in advantages_G], dtype=torch.float64)
    except (TypeError, ValueError):
        return advantages_G

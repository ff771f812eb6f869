"""Whether weights are finite, looked at where a trainer publishes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["FiniteCheck", "NotFinite", "WeightsNotFinite", "is_finite"]

_CHUNK = 2**17  # elements: the second look at a chunk finds it in the processor's cache
_INTEGERS = {1: (np.int8, np.uint8), 2: (np.int16, np.uint16), 4: (np.int32, np.uint32), 8: (np.int64, np.uint64)}


@dataclass(kw_only=True, slots=True, frozen=True)
class NotFinite:
    """A rank's answer in the place of a version that is not published."""

    version: int | str
    tensor: str
    """The first tensor with a NaN or an infinity."""


class WeightsNotFinite(ValueError):
    """A version is not published: a tensor has a NaN or an infinity."""

    def __init__(self, not_finite: NotFinite) -> None:
        super().__init__(
            f"policy_version={not_finite.version}: {not_finite.tensor} has a NaN or an infinity, so this version is "
            "not published; go on from the last saved state, with a lower learning rate"
        )


class FiniteCheck:
    """Looks at the tensors of one publication."""

    def __init__(self) -> None:
        self._first = ""
        self._extremes: list[tuple[str, torch.Tensor]] = []
        """Of tensors on a GPU: least and largest number, which are NaN where one is; read once, at the end."""

    def add(self, name: str, source: torch.Tensor, place: torch.Tensor) -> None:
        """Looks at a tensor: on its GPU, or at the bytes `place` that it was copied to and cast."""
        if self._first or not place.is_floating_point() or not place.numel():
            return
        if source.is_cuda:  # rounding keeps the order, so extremes of the cast tensor are the cast extremes
            self._extremes.append((name, torch.stack(torch.aminmax(source)).to(place.dtype).float()))
        elif not is_finite(place):
            self._first = name

    def first(self) -> str:
        """The first tensor that is not finite; empty when all are."""
        if self._extremes and not self._first:
            finite = torch.stack([extremes for _, extremes in self._extremes]).isfinite().all(dim=1).tolist()
            self._first = next((name for (name, _), fine in zip(self._extremes, finite, strict=True) if not fine), "")
        return self._first


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor of floats in host memory has no NaN and no infinity."""
    # A NaN or an infinity makes the sum one. A finite sum takes half the time of what is below, which a sum that
    # overflows needs.
    return bool(tensor.sum().isfinite()) or _has_finite_bits(tensor)


def _has_finite_bits(tensor: torch.Tensor) -> bool:
    # Bits in order of magnitude: positive numbers as signed integers, negative ones as unsigned integers. From those of
    # an infinity on they are not finite. `torch.isfinite` takes a hundred times as long.
    signed, unsigned = _INTEGERS[tensor.element_size()]
    largest = [
        torch.tensor([bound], dtype=tensor.dtype).view(torch.uint8).numpy().view(unsigned)[0]
        for bound in (float("inf"), float("-inf"))
    ]
    bits = tensor.detach().reshape(-1).view(torch.uint8).numpy().view(signed)
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK]
        if chunk.max() >= largest[0] or chunk.view(unsigned).max() >= largest[1]:
            return False
    return True

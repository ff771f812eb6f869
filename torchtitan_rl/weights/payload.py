"""A version's payload in blocks: each is cast, looked at and summed up while a core's cache has it, by every core at
once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchtitan_rl import platform
from torchtitan_rl.model.row_blocks import row_blocks
from torchtitan_rl.weights.finite import FiniteCheck, is_finite
from torchtitan_rl.weights.layout import Block, Manifest, checksum

__all__ = ["PayloadWriter", "intact"]

_BUCKET_BYTES = 2**28
"""Of tensors that wait to be written. A gathered tensor lives until then."""


class _Part(NamedTuple):
    name: str
    source: torch.Tensor | None
    """None where the bytes are in `place` already."""
    place: torch.Tensor


class PayloadWriter:
    """Writes the tensors of one version into its payload, and the checksums of its blocks into its manifest."""

    def __init__(self, manifest: Manifest, payload: torch.Tensor, *, verify: bool) -> None:
        """`payload` has `manifest.nbytes` bytes. `verify`: with checksums."""
        self._manifest, self._payload, self._verify = manifest, payload, verify
        self._waiting: list[_Part] = []
        self._waiting_bytes = 0
        self._check, self._first = FiniteCheck(), ""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Casts a tensor into its place. A tensor of other dimensions than its entry has its elements in the same
        order. Do not change the tensor before `finish`."""
        place = self._manifest.entries[name].view(self._payload).view(tensor.shape)
        if tensor.is_cuda:  # cast there, which may halve the bytes copied; the copy is asynchronous
            place.copy_(tensor.to(place.dtype), non_blocking=True)
            self._check.add(name, tensor, place)
        for rows in row_blocks(place):
            self._waiting.append(_Part(name, None if tensor.is_cuda else tensor[rows], place[rows]))
        if not tensor.is_cuda:
            self._waiting_bytes += tensor.nbytes
        if self._waiting_bytes > _BUCKET_BYTES:
            self._write()

    def finish(self) -> str:
        """Waits until all is written. Returns the name of a tensor that is not finite, the first one on a CPU; empty
        when all are."""
        platform.wait_for_copies()
        self._write()
        return self._first or self._check.first()

    def _write(self) -> None:
        parts, self._waiting, self._waiting_bytes = self._waiting, [], 0
        for part, (finite, block) in zip(parts, platform.in_threads(self._written, parts), strict=True):
            self._first = self._first or ("" if finite else part.name)
            if self._verify:
                self._manifest.blocks.append(block)

    def _written(self, part: _Part) -> tuple[bool, Block]:
        """Whether the part, once written, is finite, and its block."""
        finite = True
        if part.source is not None:
            part.place.copy_(part.source)
            finite = not part.place.is_floating_point() or is_finite(part.place)
        data, start = part.place.reshape(-1).view(torch.uint8), part.place.data_ptr() - self._payload.data_ptr()
        return finite, Block(start, start + len(data), checksum(data) if self._verify else "")


def intact(payload: torch.Tensor, manifest: Manifest) -> bool:
    """Whether every block of a payload has the checksum that its manifest says."""
    return all(
        platform.in_threads(lambda block: checksum(payload[block.start : block.end]) == block.checksum, manifest.blocks)
    )

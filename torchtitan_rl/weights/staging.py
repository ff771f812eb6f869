"""The memory into which a generator rank fetches its part of a version: a segment that ranks of its host can read."""

from __future__ import annotations

import mmap
import os
import weakref
from functools import partial

import numpy
import torch

from torchtitan_rl import platform
from torchtitan_rl.model.generator_cut import cut_dim
from torchtitan_rl.weights.layout import ALIGNMENT, Manifest, TensorEntry, host_name, open_shared
from torchtitan_rl.weights.pieces import Box, PieceManifest

__all__ = ["Staging", "part_box", "plan_part", "opened"]


def part_box(name: str, shape: tuple[int, ...], rank: int, size: int) -> Box:
    """What generator rank `rank` of `size` holds of a tensor. Raises RuntimeError where `size` does not divide it."""
    whole, dim = Box((0,) * len(shape), shape), cut_dim(name)
    if size == 1 or dim is None:
        return whole
    if shape[dim] % size:
        raise RuntimeError(f"{name}: {size} generator ranks cannot share dimension {dim} of {shape}")
    length = shape[dim] // size
    return whole.rows(rank * length, (rank + 1) * length, dim)


def plan_part(manifest: PieceManifest, rank: int, size: int) -> Manifest:
    """Lays out what a rank fetches, one tensor after another; names of one tensor share its memory."""
    entries: dict[str, TensorEntry] = {}
    offsets: dict[str, int] = {}
    end = 0
    for name, entry in manifest.entries.items():
        stored = manifest.aliases.get(name, name)
        part = part_box(stored, entry.shape, rank, size)
        if stored not in offsets:
            offsets[stored] = end
            end += -(-part.numel * entry.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        part_shape = None if size == 1 else part.shape
        entries[name] = TensorEntry(entry.shape, entry.dtype, offsets[stored], part_shape)
    return Manifest(version=manifest.version, entries=entries, nbytes=end)


class _Segment:
    """A memfd: the kernel frees it with the last process that holds it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.fd = nbytes, os.memfd_create("torchtitan_rl_staging")
        os.ftruncate(self.fd, nbytes)
        self.mapping = mmap.mmap(self.fd, nbytes)
        platform.pin_new(torch.from_numpy(self.array()))

    def array(self) -> numpy.ndarray:
        return numpy.frombuffer(self.mapping, numpy.uint8)

    def close(self) -> None:
        platform.unpin(torch.from_numpy(self.array()))
        os.close(self.fd)


class Staging:
    """Segments of one rank. A segment is used again once no tensor is left that shares its memory: the first use of a
    page costs more than the transfer of its bytes over a fast link. Without `keeps` it is freed instead."""

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._free: list[_Segment] = []

    def take(self, nbytes: int) -> tuple[str, torch.Tensor]:
        """(handle, uint8 tensor of `nbytes`); the bytes are those of an earlier use."""
        segment = next((one for one in self._free if one.nbytes == nbytes), None)
        if segment is None:
            self.close()
            segment = _Segment(nbytes)
        else:
            self._free.remove(segment)
        array = segment.array()
        unused = partial(self._free.append, segment) if self._keeps else segment.close
        weakref.finalize(array, unused).atexit = False
        return f"/proc/{os.getpid()}/fd/{segment.fd}", torch.from_numpy(array)

    def close(self) -> None:
        """Frees the segments that nobody uses."""
        while self._free:
            self._free.pop().close()


def opened(handle: str, nbytes: int, version: int | str) -> torch.Tensor | None:
    """The bytes of another process's segment, read only; None where it is not there, or cannot be opened."""
    try:
        return open_shared(Manifest(version=version, entries={}, nbytes=nbytes, handle=handle, host=host_name()))
    except (RuntimeError, ValueError):
        return None

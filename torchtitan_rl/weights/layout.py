"""Weights as one flat byte buffer, and a manifest with each tensor's shape, dtype and offset."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import xxhash

__all__ = ["Entry", "Manifest", "plan", "write", "read", "checksum", "explain_difference"]

_ALIGNMENT = 64  # bytes; an aligned tensor can be viewed in place


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in the buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(kw_only=True, slots=True)
class Manifest:
    """Everything about one published version except the bytes of the weights."""

    version: int | str
    """A policy version; for weights that one trainer role sends to another, a name."""
    entries: dict[str, Entry]
    nbytes: int
    checksum: str = ""
    handle: str = ""
    """The path of the payload's shared-memory file; empty when the store holds the payload."""
    host: str = ""
    """The host of the shared-memory file; empty when the store holds the payload."""


def plan(
    version: int | str, tensors: Iterable[tuple[str, torch.Size, torch.dtype, bool]], dtype: torch.dtype | None
) -> Manifest:
    """Lays tensors out one after another; `tensors` gives (name, shape, dtype, whether a parameter) of each.

    Parameters are sent in `dtype`, or in the parameter's dtype when `dtype` is None. Buffers keep the registered dtype.
    """
    entries, offset = {}, 0
    for name, shape, own_dtype, is_parameter in tensors:
        entry = Entry(tuple(shape), dtype if is_parameter and dtype is not None else own_dtype, offset)
        entries[name] = entry
        offset += -(-entry.nbytes // _ALIGNMENT) * _ALIGNMENT
    return Manifest(version=version, entries=entries, nbytes=offset)


def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor of an entry, sharing memory with the uint8 buffer."""
    return buffer[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)


def write(buffer: torch.Tensor, manifest: Manifest, name: str, tensor: torch.Tensor) -> None:
    """Casts one tensor and copies the tensor into the buffer. CUDA tensors are cast on the device, which may halve the
    bytes copied, and are copied asynchronously: synchronise the device before a read of the buffer."""
    place = view(buffer, manifest.entries[name])
    if tensor.is_cuda:
        place.copy_(tensor.to(place.dtype), non_blocking=True)
    else:
        place.copy_(tensor)


def read(buffer: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """All tensors, as views of the buffer."""
    return {name: view(buffer, entry) for name, entry in manifest.entries.items()}


def checksum(buffer: torch.Tensor) -> str:
    """xxh3 of the whole buffer, padding included (buffers start out zeroed).

    Computed on the host for every device: publisher and reader have the bytes in host memory, and one core reads some
    30 GB/s. `torch.hash_tensor` would run on a GPU, but is an exclusive or, blind to order.
    """
    return xxhash.xxh3_64_hexdigest(buffer.numpy().data)


def explain_difference(published: dict[str, Entry], held: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    """The differences between a manifest's entries and the tensors a model holds (name -> shape, dtype); empty if
    none."""
    problems = [f"{name} is published but not held" for name in published.keys() - held.keys()]
    problems += [f"{name} is held but not published" for name in held.keys() - published.keys()]
    for name in sorted(published.keys() & held.keys()):
        (shape, dtype), entry = held[name], published[name]
        if tuple(shape) != entry.shape:
            problems.append(f"{name} has shape {entry.shape} published, {tuple(shape)} held")
        elif dtype != entry.dtype:
            problems.append(f"{name} has dtype {entry.dtype} published, {dtype} held")
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(sorted(problems)[:3]) + more

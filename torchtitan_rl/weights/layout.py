"""Weights as one flat byte buffer, a manifest with each tensor's shape, dtype and offset, and the memory of the buffer.

On one host the buffer lies in anonymous shared memory. The kernel frees a memfd with the last process that holds the
memfd, so a killed run leaves nothing behind.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

import torch
import xxhash

from torchtitan_rl import platform
from torchtitan_rl.model.generator_cut import RankPart

__all__ = [
    "ALIGNMENT",
    "Block",
    "TensorEntry",
    "Manifest",
    "SharedBuffers",
    "pickled_at_once",
    "plan",
    "read",
    "checksum",
    "open_shared",
    "host_name",
]

ALIGNMENT = 64  # bytes; an aligned tensor can be viewed in place


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor in the buffer."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    dtype: torch.dtype
    offset: int
    part_shape: tuple[int, ...] | None = None
    """Of one generator rank's part of the tensor, where the buffer has that part; None: the buffer has all of it."""

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape if self.part_shape is None else self.part_shape).numel() * self.dtype.itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor, or a `RankPart` of it, sharing memory with the uint8 buffer."""
        flat = buffer[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.view(self.shape) if self.part_shape is None else flat.view(self.part_shape).as_subclass(RankPart)


class Block(NamedTuple):
    """Some bytes of one tensor in the buffer."""

    start: int
    end: int
    checksum: str
    """See `checksum`."""


@dataclass(kw_only=True, slots=True)
class Manifest:
    """Everything about one published version except the bytes of the weights."""

    version: int | str
    """A policy version; for weights that one trainer role sends to another, a name."""
    entries: dict[str, TensorEntry]
    nbytes: int
    blocks: list[Block] = field(default_factory=list)
    """All of the tensors' bytes; empty: there are no checksums."""
    base: str = ""
    """For adapters that nobody has merged: the name under which the base is published that they are for."""
    handle: str = ""
    """The path of the payload's shared-memory file; empty when the store holds the payload."""
    host: str = ""
    """The host of the shared-memory file; empty when the store holds the payload."""

    def __reduce__(self) -> tuple:
        return pickled_at_once(self)


def pickled_at_once(instance: Any) -> tuple:
    """What `__reduce__` of a dataclass with many small parts returns: one string of bytes. Monarch pickles messages in
    Python, which takes three times as long."""
    values = {field.name: getattr(instance, field.name) for field in fields(instance)}
    return _from_pickle, (type(instance), pickle.dumps(values))


def _from_pickle(kind: type, values: bytes) -> Any:
    return kind(**pickle.loads(values))


def plan(
    version: int | str, tensors: Iterable[tuple[str, Sequence[int], torch.dtype, bool]], dtype: torch.dtype | None
) -> Manifest:
    """Lays tensors out one after another; `tensors` gives (name, shape, dtype, whether a parameter) of each. Parameters
    are sent in `dtype` (None: their own), buffers in their own."""
    entries, offset = {}, 0
    for name, shape, own_dtype, is_parameter in tensors:
        entry = TensorEntry(tuple(shape), dtype if is_parameter and dtype is not None else own_dtype, offset)
        entries[name] = entry
        offset += -(-entry.nbytes // ALIGNMENT) * ALIGNMENT
    return Manifest(version=version, entries=entries, nbytes=offset)


def read(buffer: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """All tensors, as views of the buffer."""
    return {name: entry.view(buffer) for name, entry in manifest.entries.items()}


def checksum(buffer: torch.Tensor) -> str:
    """xxh3 of the bytes, at some 30 GB/s of a core."""
    # `torch.hash_tensor` would run on a GPU, but is an exclusive or, blind to order.
    return xxhash.xxh3_64_hexdigest(buffer.numpy().data)


# The memory of a buffer.


@cache
def host_name() -> str:
    """Host name and boot id: the boot id tells apart two machines with equal host names."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f"{socket.gethostname()}/{f.read().strip()}"


class SharedBuffers:
    """A publisher's payload segments, one per live version; a discarded version's segment is reused."""

    def __init__(self) -> None:
        self._free: list[tuple[int, torch.Tensor]] = []
        self.used: dict[int | str, tuple[int, torch.Tensor]] = {}
        self._pins = platform.device_type() == "cuda"

    def take(self, version: int | str, nbytes: int) -> tuple[str, torch.Tensor]:
        """(handle, uint8 buffer) for a version's payload; a segment's first use is slower than later uses."""
        self.release(version)  # a version published again replaces the old bytes
        slot = next((s for s in self._free if s[1].numel() == nbytes), None)
        if slot is None:
            slot = self._new(nbytes)
        else:
            self._free.remove(slot)
        self.used[version] = slot
        return f"/proc/{os.getpid()}/fd/{slot[0]}", slot[1]

    def reserve(self, nbytes: int, number: int) -> None:
        """Makes segments of so many bytes for later `take`, and touches their pages: the first write to new ones takes
        several times as long, because the system clears them one by one."""
        for _ in range(number):
            fd, buffer = self._new(nbytes)
            if not self._pins:  # which touches them
                buffer.zero_()
            self._free.append((fd, buffer))

    def _new(self, nbytes: int) -> tuple[int, torch.Tensor]:
        fd = os.memfd_create("torchtitan_rl_weights")
        os.ftruncate(fd, nbytes)
        buffer = _map(fd, nbytes)
        if self._pins:
            platform.pin_new(buffer)
        return fd, buffer

    def release(self, version: int | str) -> None:
        slot = self.used.pop(version, None)
        if slot is not None:
            self._free.append(slot)

    def close(self) -> None:
        """Unpins and closes all segments, for a publisher whose process lives on."""
        for fd, buffer in [*self._free, *self.used.values()]:
            platform.unpin(buffer)
            os.close(fd)
        self._free.clear()
        self.used.clear()


def open_shared(manifest: Manifest, *, write: bool = False) -> torch.Tensor:
    """The bytes of a version that a process of this host published.

    Raises RuntimeError for a publisher on another host and for a segment that cannot be opened.
    """
    if manifest.host != host_name():
        _refuse_host(manifest)
    try:
        with open(manifest.handle, "r+b" if write else "rb", buffering=0) as file:
            return _map(file.fileno(), manifest.nbytes, write=write)
    except OSError as error:
        raise RuntimeError(
            f"policy_version={manifest.version}: its publisher's memory cannot be opened ({error.strerror}); "
            "the trainer is gone, or process namespaces differ (then use weight_sync.transport='store')"
        ) from None


def _refuse_host(manifest: Manifest) -> None:
    raise RuntimeError(
        f"weight_sync.transport='shared_memory': version {manifest.version} was published on "
        f"{manifest.host.split('/')[0]}, this is {host_name().split('/')[0]}; use transport='store' between hosts"
    )


def _map(fd: int, nbytes: int, *, write: bool = True) -> torch.Tensor:
    """A uint8 tensor that maps a file's pages."""
    mapping = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a read-only mapping is not writable; nobody writes
        return torch.frombuffer(mapping, dtype=torch.uint8)

"""Payloads of weights in anonymous shared memory. The kernel frees a memfd with the last process that holds the memfd,
so a killed run leaves nothing behind."""

from __future__ import annotations

import mmap
import os
import socket
import warnings

import torch

from torchtitan_rl import platform
from torchtitan_rl.weights.layout import Manifest

__all__ = ["SharedBuffers", "open_shared", "host_name"]


def host_name() -> str:
    """Host name and boot id: the boot id tells apart two machines with equal host names."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f"{socket.gethostname()}/{f.read().strip()}"


class SharedBuffers:
    """A publisher's payload segments, one per live version; a discarded version's segment is reused."""

    def __init__(self) -> None:
        self._free: list[tuple[int, torch.Tensor]] = []
        self._used: dict[int | str, tuple[int, torch.Tensor]] = {}

    def take(self, version: int | str, nbytes: int) -> tuple[str, torch.Tensor]:
        """(handle, uint8 buffer) for a version's payload; a segment's first use is slower than later uses."""
        self.release(version)  # a version published again replaces the old bytes
        slot = next((s for s in self._free if s[1].numel() == nbytes), None)
        if slot is not None:
            self._free.remove(slot)
        else:
            fd = os.memfd_create("torchtitan_rl_weights")
            os.ftruncate(fd, nbytes)
            slot = fd, _map(fd, nbytes)
            platform.pin(slot[1])
        self._used[version] = slot
        return f"/proc/{os.getpid()}/fd/{slot[0]}", slot[1]

    def release(self, version: int | str) -> None:
        slot = self._used.pop(version, None)
        if slot is not None:
            self._free.append(slot)

    def close(self) -> None:
        """Unpins and closes all segments, for a publisher whose process lives on."""
        for fd, buffer in [*self._free, *self._used.values()]:
            platform.unpin(buffer)
            os.close(fd)
        self._free.clear()
        self._used.clear()


def open_shared(manifest: Manifest, *, write: bool = False) -> torch.Tensor:
    """The bytes of a version that a process of this host published.

    Raises RuntimeError for a publisher on another host and for a segment that cannot be opened.
    """
    if manifest.host != host_name():
        raise RuntimeError(
            f"weight_sync.transport='shared_memory': version {manifest.version} was published on "
            f"{manifest.host.split('/')[0]}, this is {host_name().split('/')[0]}; use transport='store' between hosts"
        )
    try:
        fd = os.open(manifest.handle, os.O_RDWR if write else os.O_RDONLY)
    except OSError as error:
        raise RuntimeError(
            f"policy_version={manifest.version}: its publisher's memory cannot be opened ({error.strerror}); "
            "the trainer is gone, or process namespaces differ (then use weight_sync.transport='store')"
        ) from None
    try:
        return _map(fd, manifest.nbytes, write=write)
    finally:
        os.close(fd)


def _map(fd: int, nbytes: int, *, write: bool = True) -> torch.Tensor:
    """A uint8 tensor that maps a file's pages."""
    mapping = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a read-only mapping is not writable; nobody writes
        return torch.frombuffer(mapping, dtype=torch.uint8)

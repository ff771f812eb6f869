"""Shared memory that a reader keeps mapped between versions, on CUDA pinned."""

from __future__ import annotations

import os

import torch

from torchtitan_rl import platform
from torchtitan_rl.weights.layout import Manifest, open_shared

__all__ = ["MappedPayloads"]


class MappedPayloads:
    """A reader's view of publishers' segments.

    Mapping a segment costs a fault for every few pages that are read, and pinning it on CUDA takes longer than copying
    from it. So a segment is mapped once and kept as long as the publisher keeps the segment. On CUDA the mapping is
    writable: CUDA does not pin read-only pages on every system.
    """

    def __init__(self) -> None:
        self._segments: dict[str, tuple[int, torch.Tensor]] = {}
        """By handle: the segment's inode and bytes. The inode tells apart successive segments with an equal handle."""

    def open(self, manifest: Manifest) -> torch.Tensor:
        """The payload's bytes. Raises RuntimeError when this process cannot open the segment."""
        for handle, (inode, buffer) in list(self._segments.items()):
            if _inode(handle) != inode:
                platform.unpin(buffer)
                del self._segments[handle]
        if manifest.handle not in self._segments:
            buffer = open_shared(manifest, write=platform.device_type() == "cuda")
            platform.pin(buffer)
            self._segments[manifest.handle] = _inode(manifest.handle), buffer
        return self._segments[manifest.handle][1]

    def close(self) -> None:
        """Unpins and drops all segments, for a reader whose process lives on."""
        for _, buffer in self._segments.values():
            platform.unpin(buffer)
        self._segments.clear()


def _inode(handle: str) -> int | None:
    """The inode of a segment; None when the publisher is gone."""
    try:
        return os.stat(handle).st_ino
    except OSError:
        return None

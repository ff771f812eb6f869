"""Shared memory as a GPU reads it: mapped once, pinned, kept."""

from __future__ import annotations

import os

import torch

from torchtitan_rl import platform
from torchtitan_rl.weights.layout import Manifest
from torchtitan_rl.weights.shared_memory import open_shared

__all__ = ["PinnedPayloads"]


class PinnedPayloads:
    """A reader's view of publishers' segments, for CUDA.

    To pin a segment takes longer than to copy from it, so it is mapped once and kept for as long as its publisher has
    it; writable, because CUDA does not pin read-only pages on every system.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, torch.Tensor]] = {}
        """By handle: the segment's inode, which tells it from a later one with the same handle, and its bytes."""

    def open(self, manifest: Manifest) -> torch.Tensor:
        """The payload's bytes. Raises RuntimeError when this process cannot have them."""
        for handle, (inode, buffer) in list(self._held.items()):
            if _inode(handle) != inode:
                platform.unpin(buffer)
                del self._held[handle]
        if manifest.handle not in self._held:
            buffer = open_shared(manifest, write=True)
            platform.pin(buffer)
            self._held[manifest.handle] = _inode(manifest.handle), buffer
        return self._held[manifest.handle][1]

    def close(self) -> None:
        """Gives all segments back, for a reader whose process lives on."""
        for _, buffer in self._held.values():
            platform.unpin(buffer)
        self._held.clear()


def _inode(handle: str) -> int | None:
    """Of a segment, or None when its publisher is gone."""
    try:
        return os.stat(handle).st_ino
    except OSError:
        return None

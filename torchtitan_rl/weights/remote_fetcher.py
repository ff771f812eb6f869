"""Fetches versions whose bytes are not in this host's shared memory: from the store, or in pieces from the ranks that
publish them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from torchtitan_rl.weights.layout import Manifest
from torchtitan_rl.weights.pieces import AnyManifest, PieceManifest
from torchtitan_rl.weights.sharded_pull import Discarded, pull
from torchtitan_rl.weights.staging import Staging

__all__ = ["RemoteFetcher"]

Get = Callable[[str], Awaitable[Any]]
_REPUBLISH_WAIT_S = 60.0
"""A publication frees its segments first, and its manifest comes last, when all ranks have written all bytes."""


class RemoteFetcher:
    """Fetches versions from other processes, for one process."""

    def __init__(self) -> None:
        self.part: tuple[int, int] | None = None
        """(rank, number of ranks) of this process in its generator: it fetches only its part of a version in pieces,
        each time into the same memory. None outside a generator: whole tensors are fetched, and no memory is kept."""
        self._staging = Staging()

    async def fetch(
        self, manifest: AnyManifest, verify: bool, get: Get, key: Callable[[str], str]
    ) -> tuple[Manifest, torch.Tensor]:
        """(manifest, payload) of a version, from the store's `key("manifest")` and `key("payload")` or from the ranks
        that publish it. Returns the newer publication when the version is published again meanwhile."""
        if not isinstance(manifest, PieceManifest):
            return manifest, await get(key("payload"))
        try:
            return await self._pull(manifest, verify)
        except Discarded:
            newer = await _published_again(manifest, get, key("manifest"))
            if newer is None:
                raise
        return await self._pull(newer, verify)

    async def _pull(self, manifest: PieceManifest, verify: bool) -> tuple[Manifest, torch.Tensor]:
        part, staging = (self.part, self._staging) if self.part else ((0, 1), Staging(keeps=False))
        return await asyncio.to_thread(pull, manifest, *part, staging, verify=verify)


async def _published_again(manifest: PieceManifest, get: Get, key: str) -> PieceManifest | None:
    """The newer publication of the version; None once the store has none, or after `_REPUBLISH_WAIT_S`."""
    end = time.monotonic() + _REPUBLISH_WAIT_S
    while time.monotonic() < end:
        try:
            newer = await get(key)
        except Exception:  # a store's own error: the version is no longer there
            return None
        if newer.sources != manifest.sources:
            return newer
        await asyncio.sleep(0.05)
    return None

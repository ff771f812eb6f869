"""Versions whose bytes do not lie in this host's shared memory: in the store, or in pieces with those who publish."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import torch

from torchtitan_rl.weights.layout import Manifest
from torchtitan_rl.weights.pieces import PieceManifest
from torchtitan_rl.weights.sharded_pull import pull
from torchtitan_rl.weights.staging import Staging

__all__ = ["Elsewhere"]


class Elsewhere:
    """One process's way to such versions."""

    def __init__(self) -> None:
        self.part = 0, 1
        """Which generator rank of how many this process is: it fetches its part of a version in pieces, and rank 0 of 1
        fetches whole tensors."""
        self._staging = Staging()

    async def fetch(
        self,
        manifest: Manifest | PieceManifest,
        verify: bool,
        get: Callable[[str], Awaitable[torch.Tensor]],
        payload: str,
    ) -> tuple[Manifest, torch.Tensor]:
        """(manifest, payload) of a version; `get(payload)` fetches a payload that the store holds."""
        if isinstance(manifest, PieceManifest):
            return await asyncio.to_thread(pull, manifest, *self.part, self._staging, verify=verify)
        return manifest, await get(payload)

"""Versioned weights in TorchStore, which carries payloads between hosts; on one host payloads lie in shared memory."""

from __future__ import annotations

from typing import Any

import torchstore

from torchtitan_rl import adapters
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["WeightStore"]

adapters.adapt_torchstore()


class WeightStore(VersionedStore):
    """Versioned weights in the TorchStore instance `name`; any process of a run may hold a `WeightStore`."""

    def __init__(self, name: str, timeout_s: float = 600.0):
        super().__init__(timeout_s)
        self.name = name

    async def start(self, procs) -> None:
        """Starts the store's volume on `procs`, a mesh of one process; TorchStore's controller is in the caller's."""
        await torchstore.initialize(mesh=procs, store_name=self.name)

    async def stop(self) -> None:
        await torchstore.shutdown(self.name)

    async def _put(self, key: str, value: Any) -> None:
        await torchstore.put(key, value, store_name=self.name)

    async def _get(self, key: str) -> Any:
        return await torchstore.get(key, store_name=self.name)

    async def _exists(self, key: str) -> bool:
        return await torchstore.exists(key, store_name=self.name)

    async def _delete(self, key: str) -> None:
        await torchstore.delete(key, store_name=self.name)

    async def _keys(self) -> list[str]:
        return await (await torchstore.client(self.name)).keys()

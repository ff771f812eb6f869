"""Versions of weights over any store of keys and values, and a store in one process.

What one trainer role sends another, and a version in pieces or of a file, is in the store from when its manifest is,
which is written last. A policy version in shared memory is not: whoever has its manifest reads it (`read`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from itertools import compress
from typing import Any, NoReturn

import torch

from torchtitan_rl.record.tracing import span
from torchtitan_rl.weights.layout import Manifest, host_name
from torchtitan_rl.weights.mapped import MappedPayloads
from torchtitan_rl.weights.payload import intact
from torchtitan_rl.weights.pieces import AnyManifest
from torchtitan_rl.weights.remote_fetcher import RemoteFetcher

__all__ = ["VersionedStore", "MemoryStore"]


class VersionedStore(ABC):
    """Publishes and fetches versions. A subclass stores values under keys: `_put`, `_get`, `_exists`, `_delete`,
    `_keys`."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self._mapped = MappedPayloads()
        self.fetcher = RemoteFetcher()

    async def publish(self, manifest: AnyManifest, payload: torch.Tensor | None, *, handle: str) -> None:
        """Makes a version visible: `keep`, then `announce`."""
        await self.keep(manifest, payload, handle=handle)
        await self.announce(manifest)

    async def keep(self, manifest: AnyManifest, payload: torch.Tensor | None, *, handle: str) -> None:
        """Notes in a manifest where the payload is. With an empty `handle` the store keeps it. `payload` None: its
        publishers serve it in pieces."""
        manifest.handle, manifest.host = handle, host_name() if handle else ""
        if not handle and payload is not None:
            with span("wait for the store"):
                await self._put(_key(manifest.version, "payload"), payload)

    async def announce(self, manifest: AnyManifest) -> None:
        """Makes a version visible whose payload is where its manifest says."""
        with span("wait for the store"):
            await self._put(_key(manifest.version, "manifest"), manifest)

    async def fetch(self, version: int | str, *, verify: bool) -> tuple[Manifest, torch.Tensor]:
        """(manifest, payload) of a version. Raises RuntimeError for a missing version and for a wrong checksum."""
        with span("wait for the store"):
            try:
                manifest = await self._get(_key(version, "manifest"))
            except KeyError:
                await self._refuse_missing(version)
        return await self.read(manifest, verify=verify)

    async def read(self, manifest: AnyManifest, *, verify: bool) -> tuple[Manifest, torch.Tensor]:
        """(manifest, payload) of a version whose manifest is known. Raises RuntimeError for a wrong checksum."""
        version = manifest.version
        if isinstance(manifest, Manifest) and manifest.handle:
            with span("read weights"):
                whole, payload = manifest, self._mapped.open(manifest)
        else:
            with span("wait for the store"):
                whole, payload = await self.fetcher.fetch(manifest, verify, self._get, lambda p: _key(version, p))
        if verify:
            with span("read weights"):
                is_intact = intact(payload, whole)
            if not is_intact:
                raise RuntimeError(f"policy_version={version}: the payload's checksum is wrong; publish it again")
        return whole, payload

    async def _refuse_missing(self, version: int | str) -> NoReturn:
        raise RuntimeError(
            f"policy_version={version}: is not in the store (it holds {await self.versions()}); "
            "pin a version to keep it, or pull the newest"
        )

    async def discard(self, version: int | str) -> None:
        """Deletes a version, the manifest first. Raises RuntimeError after `timeout_s`."""
        try:
            with span("wait for the store"):
                async with asyncio.timeout(self.timeout_s):
                    keys = _key(version, "manifest"), _key(version, "payload")
                    there = await asyncio.gather(*(self._exists(key) for key in keys))
                    for key in compress(keys, there):
                        await self._delete(key)
        except TimeoutError:
            raise RuntimeError(f"store: did not discard version {version} within {self.timeout_s:g} s") from None

    async def holds(self, version: int | str) -> bool:
        """Whether a version is published."""
        return await self._exists(_key(version, "manifest"))

    async def versions(self) -> list[int]:
        """Policy versions in the store, sorted."""
        names = [key.split("/")[1] for key in await self._keys() if key.endswith("/manifest")]
        return sorted(int(name) for name in names if name.isdigit())

    @abstractmethod
    async def _put(self, key: str, value: Any) -> None: ...

    @abstractmethod
    async def _get(self, key: str) -> Any:
        """Raises KeyError for a key without a value."""

    @abstractmethod
    async def _exists(self, key: str) -> bool: ...

    @abstractmethod
    async def _delete(self, key: str) -> None: ...

    @abstractmethod
    async def _keys(self) -> list[str]: ...


class MemoryStore(VersionedStore):
    """Versioned weights in a dict, for publisher and generator in one process."""

    def __init__(self) -> None:
        super().__init__(timeout_s=600.0)
        self._values: dict[str, Any] = {}

    async def stop(self) -> None:
        self._values.clear()
        self._mapped.close()

    async def _put(self, key: str, value: Any) -> None:
        self._values[key] = value

    async def _get(self, key: str) -> Any:
        return self._values[key]

    async def _exists(self, key: str) -> bool:
        return key in self._values

    async def _delete(self, key: str) -> None:
        del self._values[key]

    async def _keys(self) -> list[str]:
        return list(self._values)


def _key(version: int | str, part: str) -> str:
    return f"weights/{version}/{part}"

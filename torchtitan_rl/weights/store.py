"""Versioned weights in TorchStore: the store owns version, manifest and the handle to the payload.

On one host the payload itself lies in anonymous shared memory (a memfd, which the kernel frees with the
last process that holds it, so a killed run leaves nothing behind); between hosts the store carries it.
The manifest is written last: a version exists when its manifest does.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import warnings
from typing import Any

import torch
import torchstore
from monarch.actor import endpoint
from torchstore.controller import Controller as _StoreController

from torchtitan_rl import platform
from torchtitan_rl.weights.layout import Manifest, checksum

__all__ = ["adapt_torchstore", "SharedBuffers", "SharedPayloads", "WeightStore", "MemoryStore"]


def adapt_torchstore() -> None:
    """torchstore 0.1.2 mixes sync and async endpoints in one actor, which Monarch 0.7 refuses: make all async."""
    for name in ("get_controller_strategy", "locate_volumes", "notify_put", "notify_delete", "keys"):
        method = getattr(_StoreController, name)._method
        if not getattr(method, "_made_async", False):
            setattr(_StoreController, name, endpoint(_as_async(method)))


def _as_async(method):
    async def call(self, *args, **kwargs):
        return method(self, *args, **kwargs)

    call.__name__ = method.__name__
    call._made_async = True  # type: ignore[attr-defined]  # a mark, so that no method is wrapped twice
    return call


adapt_torchstore()


def _host() -> str:
    """This machine and this boot of it: two containers with one host name do not look alike."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        return f"{socket.gethostname()}/{f.read().strip()}"


class SharedBuffers:
    """A publisher's payload segments, one per live version, reused once a version is discarded."""

    def __init__(self) -> None:
        self._free: list[tuple[int, torch.Tensor]] = []
        self._used: dict[int | str, tuple[int, torch.Tensor]] = {}

    def take(self, version: int | str, nbytes: int) -> tuple[str, torch.Tensor]:
        """(handle, uint8 buffer) for a version's payload; a segment's first use is slower than later ones."""
        self.release(version)  # published again: the new bytes replace the old ones
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
        """Gives all segments back, for a publisher whose process lives on."""
        for fd, buffer in [*self._free, *self._used.values()]:
            platform.unpin(buffer)
            os.close(fd)
        self._free.clear()
        self._used.clear()


class SharedPayloads:
    """A reader's view of publishers' segments.

    On a CPU a segment is mapped for each fetch, read-only. For CUDA it is pinned, which takes longer than to copy from
    it, so it is mapped once and kept for as long as its publisher has it; writable, because CUDA does not pin read-only
    pages on every system.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, torch.Tensor]] = {}
        """By handle: the segment's inode, which tells it from a later one with the same handle, and its bytes."""

    def open(self, manifest: Manifest) -> torch.Tensor:
        """The payload's bytes. Raises RuntimeError when this process cannot have them."""
        if platform.device_type() == "cpu":
            return _open_shared(manifest, write=False)
        for handle, (inode, buffer) in list(self._held.items()):
            if _inode(handle) != inode:
                platform.unpin(buffer)
                del self._held[handle]
        if manifest.handle not in self._held:
            buffer = _open_shared(manifest, write=True)
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


def _map(fd: int, nbytes: int, *, write: bool = True) -> torch.Tensor:
    """A uint8 tensor over a file's pages."""
    mapping = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ | (mmap.PROT_WRITE if write else 0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a read-only mapping is not writable; nobody writes
        return torch.frombuffer(mapping, dtype=torch.uint8)


class WeightStore:
    """Versioned weights in the TorchStore instance of this name, from whichever process holds the object."""

    def __init__(self, name: str, timeout_s: float = 600.0):
        self.name, self.timeout_s = name, timeout_s
        self._payloads = SharedPayloads()

    async def start(self, procs) -> None:
        """The store's volume on a process mesh of one; its controller gets a process of its own."""
        await torchstore.initialize(mesh=procs, store_name=self.name)

    async def stop(self) -> None:
        await torchstore.shutdown(self.name)

    async def publish(self, manifest: Manifest, payload: torch.Tensor, *, handle: str, verify: bool) -> None:
        """Makes a version visible. With a handle the store keeps only that; without, the payload too."""
        manifest.checksum = checksum(payload) if verify else ""
        manifest.handle, manifest.host = handle, _host() if handle else ""
        if not handle:
            await self._put(_key(manifest.version, "payload"), payload)
        await self._put(_key(manifest.version, "manifest"), manifest)

    async def fetch(self, version: int | str, *, verify: bool) -> tuple[Manifest, torch.Tensor]:
        """(manifest, payload) of a published version. Raises RuntimeError when it is not there or arrives damaged."""
        if not await self._exists(_key(version, "manifest")):
            raise RuntimeError(
                f"policy_version={version}: is not in the store (it holds {await self.versions()}); "
                "pin a version to keep it, or pull the newest"
            )
        manifest: Manifest = await self._get(_key(version, "manifest"))
        if manifest.handle:
            payload = self._payloads.open(manifest)
        else:
            payload = await self._get(_key(version, "payload"))
        if verify and manifest.checksum and checksum(payload) != manifest.checksum:
            raise RuntimeError(f"policy_version={version}: the payload's checksum is wrong; publish it again")
        return manifest, payload

    async def discard(self, version: int | str) -> None:
        """Forgets a version; its manifest goes first."""

        async def delete() -> None:
            for part in ("manifest", "payload"):
                if await self._exists(_key(version, part)):
                    await self._delete(_key(version, part))

        try:
            await asyncio.wait_for(delete(), self.timeout_s)
        except TimeoutError:
            raise RuntimeError(f"store: did not discard version {version} within {self.timeout_s:g} s") from None

    async def versions(self) -> list[int]:
        """Policy versions whose manifest is there."""
        names = [key.split("/")[1] for key in await self._keys() if key.endswith("/manifest")]
        return sorted(int(name) for name in names if name.isdigit())

    # What is asked of whatever holds keys and values.

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


class MemoryStore(WeightStore):
    """The same versions in a dict, for publisher and generator in one process."""

    def __init__(self) -> None:
        super().__init__("memory")
        self._held: dict[str, Any] = {}

    async def stop(self) -> None:
        self._held.clear()
        self._payloads.close()

    async def _put(self, key: str, value: Any) -> None:
        self._held[key] = value

    async def _get(self, key: str) -> Any:
        return self._held[key]

    async def _exists(self, key: str) -> bool:
        return key in self._held

    async def _delete(self, key: str) -> None:
        del self._held[key]

    async def _keys(self) -> list[str]:
        return list(self._held)


def _key(version: int | str, part: str) -> str:
    return f"weights/{version}/{part}"


def _open_shared(manifest: Manifest, *, write: bool) -> torch.Tensor:
    if manifest.host != _host():
        raise RuntimeError(
            f"weight_sync.transport='shared_memory': version {manifest.version} was published on "
            f"{manifest.host.split('/')[0]}, this is {_host().split('/')[0]}; use transport='store' between hosts"
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

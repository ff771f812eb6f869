"""Policy versions in the store, their holders and their files, and weights from one role to another."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from torchtitan_rl.config.meshes import WeightSyncConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.finite import NotFinite, WeightsNotFinite
from torchtitan_rl.weights.payload import PayloadWriter
from torchtitan_rl.weights.pieces import AnyManifest
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["OneVersion", "PolicyVersions", "ServedVersions", "transport_of"]

logger = logging.getLogger(__name__)

_BASE = "base"
"""In the metadata of a file of adapters, the name of their base."""


class ServedVersions(Protocol):
    """What a `SamplingClient` and its replicas ask of the versions: `PolicyVersions` of a run that trains, `OneVersion`
    of generators alone."""

    served: int | None
    """The version that serves unpinned requests; None before the first pull. `SamplingClient` sets it, everybody else
    reads it."""

    async def publish(self) -> int:
        """Publishes and returns the trainer's version."""

    async def end_serving(self, version: int) -> None:
        """Says that a version serves unpinned requests no longer."""

    def pin(self, version: int, holder: str) -> None:
        """Keeps a version until `release`. Raises ValueError for a version that is not there."""

    async def release(self, version: int, holder: str) -> None:
        """Ends one `pin`."""

    def manifest(self, version: int) -> AnyManifest:
        """Of a version that somebody holds: what a generator needs to fetch it."""


class PolicyVersions:
    """Which versions exist, who holds each version, and which version serves unpinned requests.

    The holder `"newest"` holds the version published last. Until that one serves, it also holds the version that does,
    because a replica may have to load it again. Each generator replica holds the version that it serves, under the name
    of its role. Any other holder (an evaluation, a snapshot that scores) calls `pin` with a name of its own."""

    def __init__(
        self,
        trainer: TrainingClient,
        store: VersionedStore,
        config: WeightSyncConfig,
        dtype: torch.dtype,
        *,
        one_host: bool,
        adapters_apart: bool = False,
    ):
        """`adapters_apart`: a version is its adapters, which generators hold beside their base; else whole weights."""
        self._trainer, self._store, self._config, self._dtype = trainer, store, config, dtype
        self._adapters_apart = adapters_apart
        self._transport = transport_of(config, one_host=one_host)
        self._manifests: dict[int, AnyManifest] = {}
        """Of the versions that are not deleted."""
        self._in_store: set[int] = set()
        """The versions of which the store has something: the bytes, or the manifest for those who look for a newer
        publication."""
        self._holders: dict[int, Counter[str]] = {}
        self._discarding: set[asyncio.Task[None]] = set()
        self.publications: list[int] = []
        """The versions published so far, oldest first; one twice where no step was taken between two publications."""
        self.served: int | None = None

    async def publish(self) -> int:
        """Publishes and returns the trainer's version, then releases the version published before, unless that one
        serves: then `end_serving` does."""
        version = await self._push()
        previous = self.publications[-1:]
        self.publications.append(version)
        self._holders.setdefault(version, Counter())["newest"] = 1
        if previous and previous[0] not in (version, self.served):
            await self.release(previous[0], "newest")
        return version

    async def end_serving(self, version: int) -> None:
        """Releases a version that serves unpinned requests no longer, unless it is the one published last."""
        if version != self.publications[-1] and self._holders.get(version, Counter())["newest"]:
            await self.release(version, "newest")

    async def publish_for(self, holder: str) -> int:
        """Publishes the trainer's version, which serves no unpinned request, and pins the version for `holder`. Submits
        to the trainer before it first waits. Where it is cancelled, the version is discarded once it is published."""
        pushing = asyncio.ensure_future(self._push())
        try:
            version = await asyncio.shield(pushing)
        except asyncio.CancelledError:  # the trainer publishes all the same, and nobody would ever delete that version
            discarding = asyncio.ensure_future(self._discard_unheld(pushing))
            self._discarding.add(discarding)
            discarding.add_done_callback(self._discarding.discard)
            raise
        self._holders.setdefault(version, Counter())[holder] += 1
        return version

    def _push(self) -> Awaitable[int]:
        return self._announced(
            self._trainer.push_weights(self._dtype, self._transport, self._config.verify, self._adapters_apart)
        )

    async def _announced(self, pushing: Awaitable[AnyManifest]) -> int:
        """Keeps the manifest that a push answers with. Returns the version."""
        manifest = await pushing
        assert isinstance(manifest.version, int), "names are for other trainer roles"
        if not manifest.handle:  # else its bytes are in shared memory, and the manifest says where
            await self._store.announce(manifest)
            self._in_store.add(manifest.version)
        self._manifests[manifest.version] = manifest
        return manifest.version

    async def _discard_unheld(self, pushing: asyncio.Future[int]) -> None:
        try:
            version = await pushing
            if version not in self._holders:
                await self._discard(version)
        except Exception as error:  # nobody waits for this version
            logger.warning("a version that nobody waits for any more could not be published and discarded: %s", error)

    def pin(self, version: int, holder: str) -> None:
        """Keeps a version until `release`. Raises ValueError for a version that was deleted or never published."""
        if version not in self._holders:
            raise ValueError(f"policy_version={version}: is not published; these are: {sorted(self._holders)}")
        self._holders[version][holder] += 1

    async def release(self, version: int, holder: str) -> None:
        """Ends one `pin`; the last one deletes the version. Raises ValueError unless `holder` holds the version."""
        holders = self._holders.get(version, Counter())
        if not holders[holder]:
            raise ValueError(f"policy_version={version}: is not held by {holder!r} (holders: {sorted(+holders)})")
        holders[holder] -= 1
        if not holders[holder]:
            del holders[holder]
        if not holders:
            del self._holders[version]
            await self._discard(version)

    async def _discard(self, version: int) -> None:
        self._manifests.pop(version, None)
        discarding = [self._trainer.discard_weights(version)]
        if version in self._in_store:
            self._in_store.remove(version)
            discarding.append(self._store.discard(version))
        await asyncio.gather(*discarding)

    def manifest(self, version: int) -> AnyManifest:
        """Of a version that somebody holds, as it was published last: what a generator needs to fetch it. Raises
        ValueError for a version that was deleted or never published."""
        if version not in self._manifests:
            raise ValueError(f"policy_version={version}: is not published; these are: {sorted(self._manifests)}")
        return self._manifests[version]

    def holders(self) -> dict[int, list[str]]:
        """Version to the names of its holders."""
        return {version: sorted(+holders) for version, holders in sorted(self._holders.items())}

    async def copy(self, source: TrainingClient, target: TrainingClient) -> None:
        """`target` takes over the weights of `source`, bit for bit; a critic keeps its own head. The two layouts may
        differ."""
        await source.push_copy(self._transport)
        try:
            await target.pull_copy()
        finally:
            await self._store.discard("copy")
            await source.discard_weights("copy")

    async def copy_head(self, source: TrainingClient, target: TrainingClient) -> None:
        """`target` keeps the head of `source` as the head of the teacher, in the source's dtype. Layouts and hidden
        sizes may differ. The copy is no part of the target's weights or checkpoints. Copy again after the source has
        changed. Raises RuntimeError when the vocabularies differ."""
        await source.push_head(self._transport)
        try:
            await target.pull_head()
        finally:
            await self._store.discard("head")
            await source.discard_weights("head")

    async def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """The parameters of a published version, by torchtitan's names, in the generators' dtype."""
        manifest, payload = await self._store.read(self.manifest(version), verify=self._config.verify)
        return layout.read(payload, manifest)

    async def save(self, version: int, file: Path) -> None:
        """Writes the parameters of a published version as safetensors, by torchtitan's names, in the generators' dtype;
        of adapters also the name of their base. Raises ValueError for a version that is not published."""
        self.pin(version, "writing")  # its memory is the trainer's, which uses it again once the version is discarded
        try:
            manifest, payload = await self._store.read(self.manifest(version), verify=self._config.verify)
            # In a thread: gigabytes to disk, while replicas and clients wait for this loop.
            await asyncio.to_thread(_write, layout.read(payload, manifest), manifest.base, file)
        finally:
            await self.release(version, "writing")

    async def publish_file(self, version: int, file: Path, holder: str) -> None:
        """Publishes, as `version`, parameters that `save` wrote, and pins the version for `holder`. A version that is
        published already is only pinned. Raises ValueError for a file that is none of these, and WeightsNotFinite."""
        if version not in self._holders:
            try:
                with safe_open(str(file), "pt") as opened:
                    base = (opened.metadata() or {}).get(_BASE, "")
                tensors = await asyncio.to_thread(load_file, str(file))
            except SafetensorError as error:
                raise ValueError(f"{file}: is no safetensors file ({error}); use another one") from error
            await self._check_base(file, base)
            entries = ((name, tensor.shape, tensor.dtype, True) for name, tensor in tensors.items())
            manifest = layout.plan(version, entries, None)
            manifest.base = base
            payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
            if not_finite := await asyncio.to_thread(_fill, payload, manifest, tensors, self._config.verify):
                raise WeightsNotFinite(NotFinite(version=version, tensor=not_finite))
            await self._store.publish(manifest, payload, handle="")
            self._manifests[version] = manifest
            self._in_store.add(version)
            self._holders.setdefault(version, Counter())  # the trainer may have published it meanwhile, for a holder
        self.pin(version, holder)

    async def _check_base(self, file: Path, base: str) -> None:
        """Raises ValueError for a file of another kind than these versions, and for adapters of another base."""
        if self._adapters_apart and not base:
            raise ValueError(
                f"{file}: has adapters merged into its weights, and these generators hold adapters apart from their "
                "base; use generator.max_adapters=0 (serve-tinker --merged)"
            )
        if base and not self._adapters_apart:
            raise ValueError(
                f"{file}: has adapters alone, and these generators hold whole weights; set generator.max_adapters "
                "(serve-tinker without --merged)"
            )
        if base and not await self._store.holds(base):
            raise ValueError(
                f"{file}: has adapters of another base than this model's; use those that were trained on it"
            )


def _write(tensors: dict[str, torch.Tensor], base: str, file: Path) -> None:
    """Writes a file of tensors. `base`: what adapters belong to, empty for whole weights."""
    places = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in places:  # a tied head, which a file holds once more
            tensors[name] = tensor.clone()
        places.add(tensor.data_ptr())
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, str(file), {_BASE: base} if base else None)


def _fill(payload: torch.Tensor, manifest: layout.Manifest, tensors: dict[str, torch.Tensor], verify: bool) -> str:
    """Writes tensors into their places. Returns the name of one that is not finite, empty when all are."""
    writer = PayloadWriter(manifest, payload, verify=verify)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    return writer.finish()


def transport_of(config: WeightSyncConfig, *, one_host: bool) -> str:
    """What `auto` stands for: `shared_memory` where all processes are on one host and no other can join, else
    `store`."""
    if config.transport != "auto":
        return config.transport
    return "shared_memory" if one_host else "store"


class OneVersion:
    """Stands in for `PolicyVersions` where generators hold one version: the weights of a Hugging Face directory."""

    def __init__(self) -> None:
        self.served: int | None = None
        """The version that `SamplingClient.load_hf` gave the weights; None before that call."""

    async def publish(self) -> int:
        """Raises RuntimeError: nobody trains."""
        raise RuntimeError("publish: these generators hold the weights of a directory; launch without hf_weights")

    async def end_serving(self, version: int) -> None:
        """Does nothing: there is one version."""

    def pin(self, version: int, holder: str) -> NoReturn:
        """Raises ValueError: without a store, no version but the one that generators hold exists."""
        self.manifest(version)

    def manifest(self, version: int) -> NoReturn:
        """Raises ValueError, as `pin` does."""
        raise ValueError(
            f"policy_version={version}: is not published; these generators hold the weights of a directory, as version "
            f"{self.served}, and nobody trains; leave policy_version out"
        )

    async def release(self, version: int, holder: str) -> None:
        """Does nothing: no version is ever pinned."""

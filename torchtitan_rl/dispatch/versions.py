"""Policy versions in the store: the trainer publishes a version, holders keep it, the last release deletes it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from torchtitan_rl.config.actors import WeightSyncConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["PolicyVersions"]


class PolicyVersions:
    """Which versions exist, who holds each version, and which version serves unpinned requests.

    The holder `"newest"` holds the version published last. Each generator replica holds the version that it serves,
    under the name of its role. Any other holder (an evaluation, a snapshot that scores) calls `pin` with a name of its
    own.
    """

    def __init__(
        self,
        trainer: TrainingClient,
        store: VersionedStore,
        config: WeightSyncConfig,
        dtype: torch.dtype,
        *,
        one_host: bool,
    ):
        self._trainer, self._store, self._config, self._dtype = trainer, store, config, dtype
        self._transport = config.transport
        if config.transport == "auto":
            self._transport = "shared_memory" if one_host else "store"
        self._holders: dict[int, Counter[str]] = {}
        self._published: int | None = None
        self.served: int | None = None
        """The version that serves unpinned requests; None before the first pull. `SamplingClient` sets `served`,
        everybody else reads it."""

    async def publish(self) -> int:
        """Pushes the trainer's current version into the store, then releases the version published before. Returns the
        version."""
        version = await self._trainer.push_weights(self._dtype, self._transport, self._config.verify)
        previous, self._published = self._published, version
        self._holders.setdefault(version, Counter())["newest"] += 1
        if previous is not None:
            await self.release(previous, "newest")
        return version

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

    def pin(self, version: int, holder: str) -> None:
        """Keeps a version until `release`. Raises ValueError for a version that was deleted or never published."""
        if version not in self._holders:
            raise ValueError(f"policy_version={version}: is not published; the store holds {sorted(self._holders)}")
        self._holders[version][holder] += 1

    async def release(self, version: int, holder: str) -> None:
        """Ends one `pin` of a version by `holder`; the last holder's release deletes the version. Raises ValueError
        when `holder` does not hold the version."""
        holders = self._holders.get(version, Counter())
        if not holders[holder]:
            raise ValueError(f"policy_version={version}: is not held by {holder!r} (holders: {sorted(+holders)})")
        holders[holder] -= 1
        if not +holders:
            del self._holders[version]
            await self._store.discard(version)
            await self._trainer.discard_weights(version)

    async def save(self, version: int, file: Path) -> None:
        """Writes the parameters of a published version as safetensors, by torchtitan's names, in the generators'
        dtype."""
        manifest, payload = await self._store.fetch(version, verify=self._config.verify)
        save_file({name: tensor.contiguous() for name, tensor in layout.read(payload, manifest).items()}, str(file))

    async def publish_file(self, version: int, file: Path, holder: str) -> None:
        """Publishes, as `version`, parameters that `save` wrote, and pins the version for `holder`. A version that is
        published already is only pinned."""
        if version not in self._holders:
            tensors = load_file(str(file))
            entries = ((name, tensor.shape, tensor.dtype, True) for name, tensor in tensors.items())
            manifest = layout.plan(version, entries, None)
            payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
            for name, tensor in tensors.items():
                layout.write(payload, manifest, name, tensor)
            await self._store.publish(manifest, payload, handle="", verify=self._config.verify)
            self._holders[version] = Counter()
        self.pin(version, holder)

    def held(self) -> dict[int, list[str]]:
        """Version to the names of its holders."""
        return {version: sorted(+holders) for version, holders in sorted(self._holders.items())}

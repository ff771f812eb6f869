"""Who holds which policy version: the trainer publishes a version, holders keep it, the last release deletes it."""

from __future__ import annotations

from collections import Counter

import torch

from torchtitan_rl.config.meshes import WeightSyncConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["VersionHolders"]


class VersionHolders:
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
        self.publications: list[int] = []
        """The versions published so far, oldest first; one twice where no step was taken between two publications."""
        self.served: int | None = None
        """The version that serves unpinned requests; None before the first pull. `SamplingClient` sets `served`,
        everybody else reads it."""

    async def publish(self) -> int:
        """Publishes and returns the trainer's version, then releases the version published before."""
        version = await self._trainer.push_weights(self._dtype, self._transport, self._config.verify)
        previous = self.publications[-1:]
        self.publications.append(version)
        self._holders.setdefault(version, Counter())["newest"] += 1
        if previous:
            await self.release(previous[0], "newest")
        return version

    def pin(self, version: int, holder: str) -> None:
        """Keeps a version until `release`. Raises ValueError for a version that was deleted or never published."""
        if version not in self._holders:
            raise ValueError(f"policy_version={version}: is not published; the store holds {sorted(self._holders)}")
        self._holders[version][holder] += 1

    async def release(self, version: int, holder: str) -> None:
        """Ends one `pin`; the last one deletes the version. Raises ValueError unless `holder` holds the version."""
        holders = self._holders.get(version, Counter())
        if not holders[holder]:
            raise ValueError(f"policy_version={version}: is not held by {holder!r} (holders: {sorted(+holders)})")
        holders.update([holder] * (holders.pop(holder) - 1))  # without a name that holds nothing
        if not holders:
            del self._holders[version]
            await self._store.discard(version)
            await self._trainer.discard_weights(version)

    def held(self) -> dict[int, list[str]]:
        """Version to the names of its holders."""
        return {version: sorted(+holders) for version, holders in sorted(self._holders.items())}

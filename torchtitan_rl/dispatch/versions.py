"""Policy versions in the store: published by the trainer, kept while somebody holds them, then deleted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file

from torchtitan_rl.config.actors import WeightSyncConfig
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.versioned import VersionedStore

__all__ = ["PolicyVersions", "OneVersion"]


class PolicyVersions:
    """Which versions exist, who holds each, and which one serves requests that name none.

    `"newest"` holds the last version published; generators hold what they serve; anything else (a frozen teacher, an
    evaluation) pins by a name of its own.
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
        """The version that requests without one are served by, which `SamplingClient.pull` sets; None before the first
        pull. Whoever else wants to know reads it here."""

    async def publish(self) -> int:
        """Publishes the trainer's current version, once. Returns it."""
        version = await self._trainer.push_weights(self._dtype, self._transport, self._config.verify)
        previous, self._published = self._published, version
        self._holders.setdefault(version, Counter())["newest"] += 1
        if previous is not None:
            await self.release(previous, "newest")
        return version

    async def copy(self, source: TrainingClient, target: TrainingClient) -> None:
        """One trainer role takes over another's weights, exactly as they are and whatever the two layouts."""
        await source.push_copy(self._transport)
        try:
            await target.pull_copy()
        finally:
            await self._store.discard("copy")
            await source.discard_weights("copy")

    async def copy_head(self, source: TrainingClient, target: TrainingClient) -> None:
        """The source's head becomes the teacher's head that the target holds, in the source's dtype, whatever the two
        layouts and hidden sizes; it is no part of the target's weights or checkpoints. Needed again once the source has
        changed. Raises RuntimeError when the vocabularies differ."""
        await source.push_head(self._transport)
        try:
            await target.pull_head()
        finally:
            await self._store.discard("head")
            await source.discard_weights("head")

    def pin(self, version: int, holder: str) -> None:
        """Keeps a version until `release`. Raises ValueError when it is gone or never was."""
        if version not in self._holders:
            raise ValueError(f"policy_version={version}: is not published; the store holds {sorted(self._holders)}")
        self._holders[version][holder] += 1

    async def release(self, version: int, holder: str) -> None:
        """Lets go; the last holder's release deletes the version."""
        holders = self._holders.get(version, Counter())
        if not holders[holder]:
            raise ValueError(f"policy_version={version}: is not held by {holder!r} (holders: {sorted(+holders)})")
        holders[holder] -= 1
        if not +holders:
            del self._holders[version]
            await self._store.discard(version)
            await self._trainer.discard_weights(version)

    async def save(self, version: int, file: Path) -> None:
        """Writes a published version's parameters, by torchtitan's names and in the generators' dtype, as
        safetensors."""
        manifest, payload = await self._store.fetch(version, verify=self._config.verify)
        save_file({name: tensor.contiguous() for name, tensor in layout.read(payload, manifest).items()}, str(file))

    def held(self) -> dict[int, list[str]]:
        """Version to the names of its holders."""
        return {version: sorted(+holders) for version, holders in sorted(self._holders.items())}


class OneVersion:
    """`PolicyVersions` of generators that hold the weights of a Hugging Face directory: one, never published."""

    def __init__(self) -> None:
        self.served: int | None = None
        """The number that `SamplingClient.load_hf` gave those weights; None before."""

    def pin(self, version: int, holder: str) -> None:
        """Raises ValueError: a version that a generator does not hold already is nowhere."""
        raise ValueError(
            f"policy_version={version}: is not published; these generators hold the weights of a directory, as version "
            f"{self.served}, and nobody trains; leave policy_version out"
        )

    async def release(self, version: int, holder: str) -> None:
        """Nothing is kept for anybody."""

"""Policy versions in the store, their holders and their files, and weights from one role to another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.version_holders import VersionHolders
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.finite import NotFinite, WeightsNotFinite, is_finite

__all__ = ["PolicyVersions"]


class PolicyVersions(VersionHolders):
    """The versions of a run's policy."""

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

    async def publish_for(self, holder: str) -> int:
        """Publishes the trainer's version, which serves no unpinned request, and pins the version for `holder`."""
        version = await self._trainer.push_weights(self._dtype, self._transport, self._config.verify)
        self._holders.setdefault(version, Counter())[holder] += 1
        return version

    async def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """The parameters of a published version, by torchtitan's names, in the generators' dtype."""
        manifest, payload = await self._store.fetch(version, verify=self._config.verify)
        return layout.read(payload, manifest)

    async def save(self, version: int, file: Path) -> None:
        """Writes the parameters of a published version as safetensors, by torchtitan's names, in the generators'
        dtype."""
        tensors, places = await self.tensors(version), set()
        for name, tensor in tensors.items():
            if tensor.data_ptr() in places:  # a tied head, which a file holds once more
                tensors[name] = tensor.clone()
            places.add(tensor.data_ptr())
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(file))

    async def publish_file(self, version: int, file: Path, holder: str) -> None:
        """Publishes, as `version`, parameters that `save` wrote, and pins the version for `holder`. A version that is
        published already is only pinned. Raises ValueError for a file that is none of these, and WeightsNotFinite."""
        if version not in self._holders:
            try:
                tensors = load_file(str(file))
            except SafetensorError as error:
                raise ValueError(f"{file}: is no safetensors file ({error}); use another one") from error
            for name, tensor in tensors.items():
                if tensor.is_floating_point() and not is_finite(tensor):
                    raise WeightsNotFinite(NotFinite(version=version, tensor=name))
            entries = ((name, tensor.shape, tensor.dtype, True) for name, tensor in tensors.items())
            manifest = layout.plan(version, entries, None)
            payload = torch.zeros(manifest.nbytes, dtype=torch.uint8)
            for name, tensor in tensors.items():
                layout.write(payload, manifest, name, tensor)
            await self._store.publish(manifest, payload, handle="", verify=self._config.verify)
            self._holders[version] = Counter()
        self.pin(version, holder)

"""Where the policy's weights go: to the generators, to reference and critic, and to the snapshot of
self-distillation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.types.ends import Diverged
from torchtitan_rl.weights.finite import WeightsNotFinite

__all__ = ["PolicyWeights"]

_PLAYING = "rollouts that the snapshot scores"
"""The holder of a version that was the snapshot when the play of a batch began."""


class PolicyWeights:
    """Copies the policy's weights to other roles, and pins the snapshot: the version that scores for self-distillation.

    `versions` is None with generators alone: their weights are never trained or replaced.
    """

    def __init__(
        self, roles: dict[str, TrainingClient], generator: SamplingClient, versions: PolicyVersions | None
    ) -> None:
        self._roles, self._generator, self._versions = roles, generator, versions
        self.teacher_version: int | None = None
        """The version of the snapshot; None before the first call of `teacher` or `set_teacher`."""

    async def publish(self) -> int:
        """Sends the policy's weights to every generator. Returns their version. Raises Diverged for weights with a NaN
        or an infinity, which no generator gets."""
        try:
            return await self._generator.push_and_pull()
        except WeightsNotFinite as error:
            raise Diverged(str(error)) from error

    async def copy_to(self, role: str) -> None:
        """`role` takes over the policy's weights, bit for bit, through the store."""
        await self._versions.copy(self._roles["policy"], self._roles[role])

    async def teacher(self) -> int:
        """The version of the snapshot. The first call makes the newest version the snapshot, unless one is set."""
        if self.teacher_version is None:
            await self.set_teacher(self._generator.policy_version)
        return self.teacher_version

    @asynccontextmanager
    async def holding_teacher(self) -> AsyncIterator[int]:
        """The version of the snapshot, see `teacher`, which is kept while the block runs: another one may become the
        snapshot meanwhile."""
        version = await self.teacher()
        assert self._versions is not None, "`set_teacher` refuses a snapshot where there are no versions"
        self._versions.pin(version, _PLAYING)
        try:
            yield version
        finally:
            await self._versions.release(version, _PLAYING)

    async def set_teacher(self, version: int) -> None:
        """Makes `version` the snapshot, pins it and releases the snapshot before. Raises RuntimeError with generators
        alone, ValueError for a version that is not published."""
        if self._versions is None:
            raise RuntimeError(
                "self-distillation: these generators hold one set of weights and no versions; launch without hf_weights"
            )
        self._versions.pin(version, "teacher")
        previous, self.teacher_version = self.teacher_version, version
        if previous is not None:
            await self._versions.release(previous, "teacher")

    async def load_teacher(self, version: int, file: Path) -> None:
        """Publishes the weights that `save_teacher` wrote, and makes them the snapshot."""
        await self._versions.publish_file(version, file, "teacher")
        self.teacher_version = version

    async def save_teacher(self, file: Path) -> None:
        """Writes the weights of the snapshot, if there is one."""
        if self.teacher_version is not None:
            await self._versions.save(self.teacher_version, file)

"""Where the policy's weights go: to the generators, to the roles that start from them, to the version that teaches."""

from __future__ import annotations

from pathlib import Path

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.versions import PolicyVersions

__all__ = ["PolicyWeights", "passed"]


def passed(every: int, since: int, step: int) -> bool:
    """Whether a cadence of `every` steps fell due after step `since` and by `step`; 0 is never."""
    return every > 0 and step // every > since // every


class PolicyWeights:
    """Publishes the policy, copies it to other roles, and keeps the version that scores for self-distillation.

    Without `versions` the generators hold one set of weights that nobody trains.
    """

    def __init__(
        self, roles: dict[str, TrainingClient], generator: SamplingClient, versions: PolicyVersions | None
    ) -> None:
        self._roles, self._generator, self._versions = roles, generator, versions
        self.teacher_version: int | None = None
        """The policy version that scores for self-distillation; None before anything asks for it."""

    async def publish(self) -> int:
        """Sends the trainer's weights to every generator. Returns the policy version they now sample from."""
        version = await self._versions.publish()
        await self._generator.pull(version)
        return version

    async def copy_to(self, role: str) -> None:
        """A role takes over the policy's weights, exactly as they are, through the store."""
        await self._versions.copy(self._roles["policy"], self._roles[role])

    async def refresh(self, config: RunConfig, *, since: int, step: int) -> None:
        """What fell due between two steps: the reference, and the version that teaches, become the newest policy."""
        if passed(config.roles.refresh_reference_every, since, step):
            await self.copy_to("reference")
        if passed(config.algorithm.refresh_teacher_every, since, step):
            await self.set_teacher(self._generator.policy_version)

    async def teacher(self) -> int:
        """The version that scores for self-distillation; if nobody has said which, the newest from now on."""
        if self.teacher_version is None:
            await self.set_teacher(self._generator.policy_version)
        return self.teacher_version

    async def set_teacher(self, version: int) -> None:
        """This policy version scores for self-distillation from now on, and is kept for as long."""
        if self._versions is None:
            raise RuntimeError(
                "self-distillation: these generators hold one set of weights and no versions; launch without hf_weights"
            )
        self._versions.pin(version, "teacher")
        previous, self.teacher_version = self.teacher_version, version
        if previous is not None:
            await self._versions.release(previous, "teacher")

    async def save_teacher(self, file: Path) -> None:
        """Writes the version that scores for self-distillation, if there is one."""
        if self.teacher_version is not None:
            await self._versions.save(self.teacher_version, file)

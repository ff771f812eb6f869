"""What starts the trainers and generators of a run, wherever they are, and the clients that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_rl.config.meshes import GeneratorConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.repair import Repair
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.versions import PolicyVersions

if TYPE_CHECKING:
    from torchtitan_rl.dispatch.local_mesh import LocalMesh
    from torchtitan_rl.dispatch.role_mesh import RoleMesh

__all__ = ["Backend", "MeshBackend", "Stack"]


@dataclass(kw_only=True, slots=True)
class Stack:
    """The clients that a controller drives, and the backend that ends their processes."""

    launcher: Backend
    roles: dict[str, TrainingClient]
    """`policy`, and each of `reference`, `critic` and `teacher` that the config has; empty with generators alone."""
    generator: SamplingClient
    versions: PolicyVersions | None
    """None with generators alone: their weights are never trained or replaced."""
    placement: Placement | None
    """None where no roles share devices."""


class Backend(Protocol):
    """Starts what a run trains and samples with, and ends it: actors on hosts (`actors.Launcher`), objects in this
    process (`local.LocalLauncher`), or a session with a service (`tinker.RemoteLauncher`).

    `MeshBackend` is its one subclass: it adds what `stack.start_stack` needs of the first two, which have meshes.
    """

    store: Any
    """Where published weights are: TorchStore, this process's memory, or the service."""

    @property
    def attached(self) -> bool:
        """Whether the run's processes belong to the Monarch workers of their hosts; `kill` cannot end them then."""

    async def start(self, config: RunConfig, model_dir: Path, *, eos: int) -> Stack:
        """The clients of a run that trains. The generators hold no weights yet. `model_dir` has the model's config and
        tokenizer, `eos` is the token that ends a sequence."""

    async def start_generators(self, config: RunConfig, model_dir: Path) -> Stack:
        """Generators alone, which hold no weights yet."""

    async def stop(self) -> None:
        """Ends everything that was started, in order."""

    def kill(self) -> None:
        """Ends what an interrupted run has on this machine, at once."""


class MeshBackend(Backend, Protocol):
    """A backend whose trainers and generators are meshes of ranks, which `stack.start_stack` puts clients over: actors,
    and this process."""

    @property
    def one_host(self) -> bool:
        """Whether all role meshes are on one host: weights may then travel through shared memory."""

    @property
    def shares_cores(self) -> bool:
        """Whether trainers and generators are processes of this machine that compute at the same time."""

    async def start_store(self) -> None:
        """Starts `store`."""

    async def start_trainer(
        self, config: TrainerConfig, model: ModelConfig, *, role: str, seed: int, share_with: str | None = None
    ) -> RoleMesh | LocalMesh:
        """A trainer mesh whose ranks hold their models, on devices of its own or on those of the role `share_with`."""

    async def start_generator(
        self, config: GeneratorConfig, model: ModelConfig, *, role: str, seed: int, share_with: str | None = None
    ) -> RoleMesh | LocalMesh:
        """One generator replica, whose engine is ready and holds no weights yet. `model.assets` is a directory with a
        config.json and the tokenizer."""

    def repair(self, config: GeneratorConfig) -> Repair | None:
        """How lost replicas are replaced; None where they are not."""

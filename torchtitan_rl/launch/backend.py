"""Where the trainers and generators of a run are: a backend, asked before anything starts; the launcher that it gives,
which starts and ends them; and the clients that the launcher makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a config is checked without Monarch and torch.distributed, which the clients import
    from pathlib import Path

    from torchtitan_rl.config.meshes import GeneratorConfig, TrainerConfig
    from torchtitan_rl.config.model import ModelConfig
    from torchtitan_rl.config.run import RunConfig
    from torchtitan_rl.dispatch.local_mesh import LocalMesh
    from torchtitan_rl.dispatch.placement import Placement
    from torchtitan_rl.dispatch.repair import Repair
    from torchtitan_rl.dispatch.role_mesh import RoleMesh
    from torchtitan_rl.dispatch.sampling_client import SamplingClient
    from torchtitan_rl.dispatch.training_client import TrainingClient
    from torchtitan_rl.dispatch.versions import PolicyVersions
    from torchtitan_rl.launch.attach import Hosts
    from torchtitan_rl.launch.joined_hosts import JoinedHosts
    from torchtitan_rl.launch.replicas import Replicas
    from torchtitan_rl.record.schedule import Schedules

__all__ = ["Backend", "Launcher", "MeshLauncher", "Stack"]


class Backend(Protocol):
    """Where trainers and generators may be, as a run asks for it by name (`launch.choice.BACKENDS`). It says what it
    cannot run, and makes the launcher of a run."""

    @property
    def takes_hosts(self) -> bool:
        """Whether a run may have other hosts than this one."""

    @property
    def in_this_process(self) -> bool:
        """Whether trainers, losses and rewards compute on the calling thread, where a debugger may stop them."""

    @property
    def has_engines(self) -> bool:
        """Whether the generators are engines of this run, which can record their schedules."""

    def settle(self, config: RunConfig) -> RunConfig:
        """The config with nothing left open."""

    def check(self, config: RunConfig, *, generators_only: bool) -> None:
        """Raises ValueError for a settled config that this backend cannot run, whatever the machine."""

    def hosts_for(self, config: RunConfig, hosts: Hosts | None, *, generators_only: bool) -> Hosts | None:
        """The hosts of the run: those that are attached, or this one; None where a launcher needs none. Raises
        ValueError for a config that `check` refuses or that does not fit there now, and for `hosts` without
        `takes_hosts`."""

    def device_name(self, hosts: Hosts | None) -> str | None:
        """What trainers compute on, with the hosts that `hosts_for` returned: the name of a GPU, "" for CPUs, None
        where nobody here knows."""

    def missing_weights(self, config: RunConfig) -> str:
        """Why a run that trains cannot start: files of weights are missing, or do not fit; "" when it can."""

    def launcher(
        self, config: RunConfig, hosts: Hosts | None, log_dir: str, schedules: Schedules | None = None
    ) -> Launcher:
        """What starts the run on the hosts that `hosts_for` returned. Processes log into `log_dir`. `schedules`: where
        generators record their schedules, and which they follow; None: nowhere, and none."""


@dataclass(kw_only=True, slots=True)
class Stack:
    """The clients that a controller drives, and the launcher that ends their processes."""

    launcher: Launcher
    roles: dict[str, TrainingClient]
    """`policy`, and each of `reference`, `critic`, `teacher` and `reward_model` that the config has; empty with
    generators alone."""
    generator: SamplingClient
    versions: PolicyVersions | None
    """None with generators alone: their weights are never trained or replaced."""
    placement: Placement | None
    """None where no roles share devices."""
    replicas: Replicas | None = None
    """Changes the number of the generator's replicas; None where that is fixed."""
    joined_hosts: JoinedHosts | None = None
    """Takes further hosts into the run; None where no other host reaches its processes."""


class Launcher(Protocol):
    """Starts what a run trains and samples with, and ends it: actors on hosts (`actors.ActorLauncher`), objects in this
    process (`local.LocalLauncher`), or a session with a service (`tinker.RemoteLauncher`)."""

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


class MeshLauncher(Launcher, Protocol):
    """A launcher whose trainers and generators are meshes of ranks, over which `stack.start_stack` puts clients:
    actors (`actors.ActorLauncher`), and objects in this process (`local.LocalLauncher`)."""

    @property
    def schedules(self) -> Schedules | None:
        """Where generators record their schedules, and which they follow; None: nowhere, and none."""

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
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        *,
        role: str,
        seed: int,
        share_with: str | None = None,
        host: int | None = None,
    ) -> RoleMesh | LocalMesh:
        """One generator replica, whose engine is ready and holds no weights yet. `model.assets` is a directory with a
        config.json and the tokenizer. `host`: the index of the host where it is to be; None: any."""

    @property
    def takes_replicas(self) -> bool:
        """Whether generator replicas may join and leave a run."""

    async def stop_generator(self, role: str) -> None:
        """Ends a replica that is not used any more, or did not start; its devices are free then."""

    def repair(self, config: GeneratorConfig) -> Repair | None:
        """How lost replicas are replaced; None where they are not."""

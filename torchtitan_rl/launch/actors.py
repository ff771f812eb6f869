"""Starting and stopping the processes of a run: meshes of actors on the run's hosts."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import monarch.actor
import psutil

from torchtitan_rl.actors.generator import Generator
from torchtitan_rl.actors.operations import WorkerProcess
from torchtitan_rl.actors.trainer import PolicyTrainer
from torchtitan_rl.config.meshes import GeneratorConfig, TrainerConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.dispatch.repair import Repair
from torchtitan_rl.dispatch.role_mesh import RoleMesh, deadline
from torchtitan_rl.environment import default_environment
from torchtitan_rl.launch.attach import Hosts, this_host
from torchtitan_rl.launch.backend import MeshLauncher, Stack
from torchtitan_rl.launch.bootstrap import claim_devices
from torchtitan_rl.launch.inventory import Devices, MeshSize, Place, interface_of
from torchtitan_rl.launch.joined_hosts import JoinedHosts
from torchtitan_rl.launch.liveness import JOIN_S
from torchtitan_rl.launch.liveness.lease import ANSWERS_S
from torchtitan_rl.launch.rendezvous import Rendezvous
from torchtitan_rl.launch.sandboxes import start_sandbox_hosts
from torchtitan_rl.launch.spares import Spares
from torchtitan_rl.launch.stack import start_generators, start_stack
from torchtitan_rl.record.schedule import Schedules
from torchtitan_rl.tasks.sandbox import registry

if TYPE_CHECKING:
    from torchtitan_rl.dispatch.sandbox_hosts import RunHosts
    from torchtitan_rl.weights.store import WeightStore

__all__ = ["ActorLauncher"]

logger = logging.getLogger(__name__)

_END_WITHIN_S = 5.0
_LOOPBACK = "127.0.0.1"


@dataclass(slots=True)
class _Replica:
    """A generator replica: what it is started from, its devices, and the processes that it is now."""

    role: str
    config: GeneratorConfig
    model: ModelConfig
    seed: int
    size: MeshSize
    place: Place
    processes: Any = None
    """Monarch's mesh of its processes; None before the first ones are there and after the replica was stopped."""
    has_devices: bool = True
    """False once it was stopped and its devices are free for others."""


@dataclass
class ActorLauncher(MeshLauncher):
    """Spawns the meshes of a run and remembers them, so that `stop` leaves no process behind."""

    log_dir: str | None
    start_timeout_s: float
    call_timeout_s: float
    hosts: Hosts = field(default_factory=this_host)
    """Hosts for the meshes: this machine alone, unless `attach.attach` has connected to other hosts."""
    failures: list[str] = field(default_factory=list)
    """Monarch's reports of processes that died without `stop`; each report is also logged on arrival."""
    schedules: Schedules | None = None
    """Where generators record their schedules, and which they follow; None: nowhere, and none."""
    pids: list[int] = field(default_factory=list)
    """Processes of roles on this machine; empty where Monarch workers own the processes (`attached`)."""
    store_name: str = field(default_factory=lambda: f"weights-{uuid.uuid4().hex[:8]}")
    """The name of this run's TorchStore; a process may hold several runs."""
    store: Any = None
    _meshes: list[Any] = field(default_factory=list)
    _stopping: bool = False
    _replicas: dict[str, _Replica] = field(default_factory=dict)
    """The generator replicas by role, also those that were stopped."""
    _role_pids: dict[str, list[int]] = field(default_factory=dict)
    _closed: set[int] = field(default_factory=set)
    """The hosts that leave or have left."""
    _removals: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    """By the index of a host that has joined."""
    _num_restarts: int = 0
    _spares: Spares | None = None
    _sandbox_hosts: RunHosts | None = None
    """Where sandboxes are opened; None: in the controller's process."""

    def __post_init__(self) -> None:
        self._devices = Devices(self.hosts.hosts)
        # Monarch's default hook would end this process at a failure that nobody awaits. With this hook, calls to the
        # failed actors raise instead.
        monarch.actor.unhandled_fault_hook = self._note_failure

    @property
    def one_host(self) -> bool:
        """Whether all role meshes are on one host and stay there: weights may then travel through shared memory."""
        return not self.hosts.attached

    @property
    def attached(self) -> bool:
        """Whether the run's processes belong to the Monarch workers of their hosts. `kill` cannot end them then, and
        further hosts may join."""
        return self.hosts.attached

    @property
    def shares_cores(self) -> bool:
        return not self.attached

    @property
    def takes_replicas(self) -> bool:
        return True

    async def start(self, config: RunConfig, model_dir: Path, *, eos: int) -> Stack:
        await self._start_sandbox_hosts(config)
        stack = await start_stack(config, self, model_dir)
        if stack.replicas is not None and self.hosts.own:
            stack.joined_hosts = JoinedHosts(self, stack.replicas, config)
        return stack

    async def start_generators(self, config: RunConfig, model_dir: Path) -> Stack:
        await self._start_sandbox_hosts(config)
        return await start_generators(config, self, model_dir)

    async def _start_sandbox_hosts(self, config: RunConfig) -> None:
        """Before the meshes: a host that cannot run the config's sandboxes is refused within seconds."""
        self._sandbox_hosts = await start_sandbox_hosts(
            config, self.hosts, self._spawn, timeout_s=self.start_timeout_s, log_dir=self.log_dir
        )
        if self._sandbox_hosts is not None:
            registry.register(self._sandbox_hosts)

    async def start_trainer(
        self, config: TrainerConfig, model: ModelConfig, *, role: str, seed: int, share_with: str | None = None
    ) -> RoleMesh:
        """A trainer mesh whose ranks hold their models, on GPUs of its own or on the GPUs of the role `share_with`."""
        place = self._devices.take(
            MeshSize(role=role, num_ranks=config.num_ranks, num_hosts=config.num_hosts, share_with=share_with)
        )
        procs = await self._spawn(role, config.num_ranks, place)
        await self._in_time(self._rendezvous(procs, place), f"{role}: rendezvous")
        actors = procs.spawn(role, PolicyTrainer, config, model, role, seed, self.log_dir, self.store_name)
        return await self._set_up(
            role,
            actors,
            place,
            num_ranks=config.num_ranks,
            tensor_parallel_size=config.parallelism.tensor_parallel_degree,
        )

    async def start_generator(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        *,
        role: str,
        seed: int,
        share_with: str | None = None,
        host: int | None = None,
    ) -> RoleMesh:
        """One generator replica, whose engine is ready and holds no weights yet. Replicas go round the hosts, or are on
        the one with the index `host`."""
        ranks = config.tensor_parallel_degree
        size = MeshSize(role=role, num_ranks=ranks, replica=True, share_with=share_with, host=host)
        replica = _Replica(role, config, model, seed, size, self._devices.take(size))
        # Monarch knows every mesh of a run by its name, also one that has ended.
        name = self._another_name(role) if role in self._replicas else role
        self._replicas[role] = replica
        return await self._start_replica(replica, name)

    async def _start_replica(self, replica: _Replica, name: str) -> RoleMesh:
        """Starts the processes of a replica, the first ones or a replacement, as the mesh `name` of Monarch."""
        ranks, role = replica.size.num_ranks, replica.role
        processes = await self._spare_or_new(name, ranks, replica.place)
        replica.processes = processes
        if ranks > 1:
            await self._in_time(self._rendezvous(processes, replica.place), f"{role}: rendezvous")
        actors = processes.spawn(
            name, Generator, replica.config, replica.model, role, replica.seed, self.log_dir, self.store_name,
            replica.size.share_with is not None, self.schedules,
        )  # fmt: skip
        mesh = await self._set_up(role, actors, replica.place, num_ranks=ranks, tensor_parallel_size=ranks)
        if self._spares is not None:
            self._spares.fill()
        return mesh

    async def stop_generator(self, role: str) -> None:
        """Ends a generator replica that is not used any more, or did not start; its devices are free then."""
        replica = self._replicas.get(role)
        if replica is None:  # there was no room for it
            return
        processes, replica.processes = replica.processes, None
        if processes is not None:
            await self._stop_in_order(role, processes, "has left")
            self._forget_processes(role, processes)
        if replica.has_devices:
            replica.has_devices = False
            self._devices.give_back(replica.size)

    def add_host(self) -> None:
        """Replicas may be on the next one of `hosts`, which has joined."""
        self._devices.add()

    def close_host(self, index: int) -> None:
        """No replica starts on a host any more, nor is one replaced there."""
        self._devices.close(index)
        self._closed.add(index)

    def replicas_on(self, index: int) -> list[str]:
        """The replicas on a host, also those that start, and lost ones."""
        replicas = self._replicas.items()
        return [role for role, replica in replicas if index in replica.place.hosts and replica.has_devices]

    async def remove_host(self, index: int) -> None:
        """A joined host has left or is gone, and with it what is there of the run. The repair and who asks the host to
        leave may both come here: all wait for one removal."""
        if index not in self._removals:
            self._removals[index] = asyncio.ensure_future(self._remove_host(index))
        await asyncio.shield(self._removals[index])

    async def _remove_host(self, index: int) -> None:
        self.close_host(index)
        await asyncio.gather(*map(self.stop_generator, self.replicas_on(index)))
        await self.hosts.remove(index)

    def repair(self, config: GeneratorConfig) -> Repair | None:
        """How lost replicas are replaced, with spare processes for them; None with `max_replica_restarts` 0."""
        if not config.max_replica_restarts:
            return None
        return Repair(
            self.restart_generator,
            on_answered=partial(self.keep_spares, config) if config.num_spares else None,
            gone=self._host_gone if self.attached else None,
            max_restarts=config.max_replica_restarts,
            window_s=config.restart_window_s,
            probe_every_s=config.probe_every_s,
            hang_timeout_s=config.hang_timeout_s,
        )

    def keep_spares(self, config: GeneratorConfig) -> None:
        """Prepares processes for replacements of lost replicas. On other hosts replacements start from scratch."""
        if config.num_spares and not self.hosts.attached:
            self._spares = Spares(
                config.num_spares,
                config.tensor_parallel_degree,
                eager=config.compiles_nothing,
                timeout_s=self.start_timeout_s,
                spawn=self._spawn,
                on_pids=self.pids.extend,
            )
            self._spares.fill()

    async def _spare_or_new(self, name: str, ranks: int, place: Place):
        spare = None if self._spares is None else await self._spares.take(place)
        return await self._spawn(name, ranks, place) if spare is None else spare

    async def restart_generator(self, role: str) -> RoleMesh:
        """A replacement for a generator replica, on the same devices. Ends what is left of the replica first."""
        replica = self._replicas[role]
        if replica.processes is None:
            raise RuntimeError(f"{role}: was stopped, so nothing replaces it; start a replica with another name")
        are_known = role in self._role_pids  # not those of a replacement that failed before it said them
        self._forget_processes(role, replica.processes)
        if self.hosts.attached or not are_known:  # attached: they belong to the workers of their hosts
            await self._stop_in_order(role, replica.processes, "lost")
        if self.hosts.attached:
            for index in replica.place.hosts:
                if index not in self.hosts.joined:  # those are there: `_host_gone` has looked
                    await self.hosts.await_back(index, JOIN_S)
        return await self._start_replica(replica, self._another_name(role))

    async def _host_gone(self, role: str) -> str:
        """Why nothing replaces a lost replica: its host, which had joined, has left or is gone; "" where it is
        there. What is left of a host that is gone is forgotten."""
        for index in self._replicas[role].place.hosts:
            if index in self._closed:
                return f"host {self.hosts.hosts[index].address} leaves"
            lease = self.hosts.leases.get(index)
            if index in self.hosts.joined and lease and not await asyncio.to_thread(lease.answers, ANSWERS_S):
                address = self.hosts.hosts[index].address
                if index not in self._closed:
                    self.close_host(index)
                    logger.warning("host %s is gone", address, extra={"event": "host_lost", "who": address})
                    await self.remove_host(index)
                return f"host {address} is gone"
        return ""

    def _another_name(self, role: str) -> str:
        self._num_restarts += 1
        return f"{role}-restart{self._num_restarts}"

    def _forget_processes(self, role: str, procs) -> None:
        """Kills what is left of the processes of a role on this machine."""
        if procs in self._meshes:  # no longer where a replacement before this one did not start
            self._meshes.remove(procs)
        for pid in self._role_pids.pop(role, ()):
            _kill(pid)
            self.pids.remove(pid)

    async def _stop_in_order(self, role: str, procs, reason: str) -> None:
        try:
            await asyncio.wait_for(_awaited(procs.stop(reason)), _END_WITHIN_S)
        except Exception as error:  # a mesh that has failed cannot be stopped in order
            logger.warning("%s: did not stop in order (%s: %s)", role, type(error).__name__, error)

    async def start_store(self) -> None:
        """Starts TorchStore. On one host it holds manifests, and its volume is in this process, where TorchStore's
        controller is always. Between hosts payloads of adapters travel through it: carrying them would hold this
        process up, so the volume has one of its own on the first host."""
        procs = monarch.actor.this_proc()
        if not self.one_host:
            procs = await self._spawn("store", 1, Place(hosts=[0], devices=[""]))
        # Importing TorchStore takes most of a second. On a thread, or the other meshes would wait with their starts.
        store_class = await asyncio.to_thread(_weight_store)
        store = store_class(self.store_name, timeout_s=self.call_timeout_s)
        await self._in_time(store.start(procs), "store: start")
        self.store = store

    async def _spawn(self, role: str, num_ranks: int, place: Place):
        # Processes of a Monarch worker have the worker's environment, and use its interface. All others inherit the
        # environment of this one, and need no interface but the loopback.
        environment = default_environment() | ({} if self.hosts.attached else interface_of(_LOOPBACK))
        addresses = [self.hosts.hosts[index].address.rpartition(":")[0] for index in place.hosts]
        bootstrap = partial(claim_devices, place.devices, environment, addresses if self.hosts.attached else None)
        procs = self.hosts.mesh_of(place.hosts).spawn_procs(
            per_host={"gpus": num_ranks // len(place.hosts)}, name=role.replace("-", "_"), bootstrap=bootstrap
        )
        self._meshes.append(procs)
        await self._in_time(procs.initialized, f"{role}: process start")
        return procs

    def _in_time(self, call, label: str):
        return deadline(call, self.start_timeout_s, label)

    async def _rendezvous(self, procs, place: Place) -> None:
        """Sets RANK, WORLD_SIZE, MASTER_ADDR and the like in every process of a mesh."""
        # A host's name may resolve to its loopback, so MASTER_ADDR is the address that other hosts use.
        one_host = len(place.hosts) == 1
        address = _LOOPBACK if one_host else self.hosts.hosts[place.hosts[0]].address.rpartition(":")[0]
        actors = procs.spawn("rendezvous", Rendezvous)
        port = await actors.flatten("rank").slice(rank=0).listen.call_one(address)
        await actors.join.call(address, port)

    async def _set_up(self, role: str, actors, place: Place, *, num_ranks: int, tensor_parallel_size: int) -> RoleMesh:
        addresses: Sequence[str] = ()
        if self.hosts.attached:
            per_host = num_ranks // len(place.hosts)
            addresses = [self.hosts.hosts[index].address for index in place.hosts for _ in range(per_host)]
        mesh = RoleMesh(
            role,
            actors,
            num_ranks=num_ranks,
            tensor_parallel_size=tensor_parallel_size,
            timeout_s=self.call_timeout_s,
            hosts=addresses,
            lost_hosts=partial(self.hosts.lost, place.hosts),
            stopped=self.stopped,
        )
        pids = await mesh.call_each(WorkerProcess.pid, timeout_s=self.start_timeout_s)
        if not self.hosts.attached:
            self.pids += [pid for pid in pids if pid not in self.pids]  # a spare is known already
            self._role_pids[role] = mesh.pids = pids
        await mesh.call_each(WorkerProcess.setup, timeout_s=self.start_timeout_s)
        return mesh

    def stopped(self) -> list[str]:
        """The processes of the run on this machine that somebody has stopped (SIGSTOP), each with its role."""
        names = {pid: f"{role}-{rank}" for role, pids in self._role_pids.items() for rank, pid in enumerate(pids)}
        stopped = []
        for process in psutil.Process().children(recursive=True):
            try:
                if process.status() == psutil.STATUS_STOPPED:
                    stopped.append(f"{names.get(process.pid, 'another process of the run')} (pid {process.pid})")
            except psutil.NoSuchProcess:
                pass
        return stopped

    def _note_failure(self, failure) -> None:
        report = " ".join(str(failure.report()).split())
        self.failures.append(report)
        # Every process has an actor that forwards logs, and some have been spares: no line of their own.
        if not self._stopping and not failure.mesh_name.startswith(("logger-", "spare-")):
            log_fields = {"event": "process_failed", "who": failure.mesh_name}
            logger.warning("Monarch reports: %s", report[:500], extra=log_fields)

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Stops every mesh, then kills the processes that are left after `timeout_s` or cannot be stopped."""
        self._stopping = True
        if self._sandbox_hosts is not None:  # while its actors are there; it takes seconds at most
            registry.unregister(self._sandbox_hosts)
            await self._sandbox_hosts.close()

        async def stop_all() -> None:
            stops = [self.store.stop()] if self.store is not None else []
            results = await asyncio.gather(*stops, return_exceptions=True)
            results += await asyncio.gather(
                *(mesh.stop("run finished") for mesh in reversed(self._meshes)), return_exceptions=True
            )
            results += await asyncio.gather(self.hosts.release(), return_exceptions=True)  # workers stay, for others
            for error in results:  # a mesh that has failed, or has not finished starting, cannot be stopped in order
                if isinstance(error, Exception):
                    logger.warning("did not stop in order (%s: %s); killing it", type(error).__name__, error)

        try:
            await asyncio.wait_for(stop_all(), timeout_s)
        except TimeoutError:
            logger.warning(
                "meshes did not stop within %g s; %s",
                timeout_s,
                "end the workers of their hosts" if self.hosts.attached else "killing their processes",
            )
        self._meshes.clear()
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to the run's processes on this machine, for an interrupted run. Processes that belong to
        Monarch workers (`attached`) live on."""
        self._stopping = True
        for pid in self.pids:
            _kill(pid)
        self.pids.clear()


def _weight_store() -> type[WeightStore]:
    from torchtitan_rl.weights.store import WeightStore

    return WeightStore


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


async def _awaited(call):
    return await call

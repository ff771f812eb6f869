"""Connecting to the Monarch workers of other hosts. There is no authentication: use private interfaces."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import monarch.actor

from torchtitan_rl import adapters
from torchtitan_rl.dispatch.role_mesh import deadline
from torchtitan_rl.environment import HOST_ADDRESS
from torchtitan_rl.launch.addresses import split, workers_problem
from torchtitan_rl.launch.agreement import disagreement, facts
from torchtitan_rl.launch.host_probe import HostProbe
from torchtitan_rl.launch.inventory import Host, address_towards, local_host
from torchtitan_rl.launch.liveness.lease import ANSWERS_S, Lease, ask_to_attach

__all__ = ["Hosts", "this_host", "attach"]

logger = logging.getLogger(__name__)

adapters.configure_monarch()

_CONNECT_S = 3.0
"""Seconds in which a worker that is there takes a connection: less than Monarch's 8 s of silence, so that a failed call
names the host that is gone."""


@dataclass(kw_only=True)
class Hosts:
    """The machines of a run: Monarch's mesh of hosts, and the cores and GPUs of each host."""

    mesh: Any
    hosts: list[Host]
    attached: bool = False
    """Whether the run's processes belong to the Monarch workers of their hosts, and not to this process."""
    config_file: str | None = None
    """The config file of the run, which hosts that come back have to agree about too."""
    leases: dict[int, Lease] = field(default_factory=dict)
    """By the index of a host: what keeps its worker serving. None for workers that a job started."""
    own: str = ""
    """Where the hosts reach this process; "" where no further host can."""
    joined: set[int] = field(default_factory=set)
    """The hosts that came after the start of the run and have not left."""
    _left: set[int] = field(default_factory=set)
    """The hosts that have joined and left again. No other host gets their indices."""
    _single: dict[int, Any] = field(default_factory=dict)
    """Monarch's mesh of each host that has joined, or was lost and has come back."""
    _locks: dict[int, asyncio.Lock] = field(default_factory=dict)
    """By the index of a host."""

    def present(self) -> list[int]:
        """The indices of the hosts that have not left."""
        return [index for index in range(len(self.hosts)) if index not in self._left]

    async def lost(self, mesh_hosts: Sequence[int]) -> list[str]:
        """Addresses of the hosts whose worker does not answer; [] unless `attached`. Looks at the hosts that the run
        began with, and at those of a mesh: what a joined host does concerns no other mesh."""
        if not self.attached:
            return []
        looked_at = [index for index in self.present() if index not in self.joined or index in mesh_hosts]
        errors = await asyncio.gather(*(_unreachable(f"tcp://{self.hosts[index].address}") for index in looked_at))
        return [self.hosts[index].address for index, error in zip(looked_at, errors, strict=True) if error]

    def mesh_of(self, indices: list[int]) -> Any:
        """Monarch's mesh of adjacent hosts."""
        first, last = indices[0], indices[-1]
        if not self.attached:
            return self.mesh
        if first == last and first in self._single:
            return self._single[first]
        return self.mesh.slice(hosts=first if first == last else slice(first, last + 1))

    async def await_back(self, index: int, within_s: float) -> None:
        """Returns at once where a host's worker has been there all the time. Otherwise waits for another worker at the
        same address and attaches to it. Raises RuntimeError naming the host after `within_s` seconds, ValueError where
        the host that came back has other code."""
        async with self._locks.setdefault(index, asyncio.Lock()):  # all replicas of the host ask
            await self._await_back(index, within_s)

    async def _await_back(self, index: int, within_s: float) -> None:
        lease = self.leases.get(index)
        if lease is None or await asyncio.to_thread(lease.answers, ANSWERS_S):
            return
        address = self.hosts[index].address
        await _listening(f"tcp://{address}", within_s)
        if await asyncio.to_thread(lease.answers, ANSWERS_S):
            return  # it was the network
        await asyncio.to_thread(lease.end)
        self._single[index], monarch_at, _ = await _attach_one(f"tcp://{address}", within_s, self.config_file)
        self.leases[index] = Lease(*split(f"tcp://{address}"), monarch_at)

    async def join(self, worker: str, timeout_s: float, on_leave: Callable[[int, float], None]) -> int:
        """Attaches to the worker of one more host. Returns the host's index. `on_leave(index, seconds)` is called, on a
        thread of its own, when the host is to leave. Raises ValueError for a run that other hosts cannot reach, a
        worker that is there already, and a host that disagrees with this one; RuntimeError for a worker that cannot be
        reached within `timeout_s`."""
        if not self.own:
            raise ValueError(
                f"hosts={worker}: the run's processes listen on this machine alone, or are a job of Kubernetes; begin "
                "the run with --hosts and the address of a worker on each of its machines, or as a job of Slurm"
            )
        present = [f"tcp://{self.hosts[index].address}" for index in self.present()]
        if worker in present:
            raise ValueError(f"hosts={worker}: is a host of the run already")
        if problem := workers_problem([*present, worker], self.own):
            raise ValueError(problem)
        await _listening(worker, timeout_s)
        mesh, monarch_at, host = await _attach_one(worker, timeout_s, self.config_file)
        index = len(self.hosts)
        self.hosts.append(host)
        self._single[index] = mesh
        self.leases[index] = Lease(*split(worker), monarch_at, lambda seconds: on_leave(index, seconds))
        self.joined.add(index)
        return index

    async def remove(self, index: int) -> None:
        """A joined host has left the run, or is gone. Stop the processes that the run started there first."""
        self.joined.discard(index)
        self._left.add(index)
        mesh, lease = self._single.pop(index), self.leases.pop(index)
        try:
            await asyncio.wait_for(_stopped(mesh), ANSWERS_S)
        except Exception as error:  # the host may be gone by now
            logger.warning("host %s: did not stop in order (%s)", self.hosts[index].address, error)
        finally:
            await asyncio.to_thread(lease.end)

    async def release(self) -> None:
        """Frees the workers for the next run. Stop the processes that the run started on them first."""
        if not self.attached:
            return
        meshes = [self.mesh, *self._single.values()]
        results = await asyncio.gather(*(_stopped(mesh) for mesh in meshes), return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(lease.end) for lease in self.leases.values()))
        for error in filter(None, results):
            raise error

    async def abandon(self, within_s: float) -> None:
        """`release` for a run that has failed already: what fails now is logged."""
        try:
            await asyncio.wait_for(self.release(), within_s)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("hosts: a worker was not told of the end, and begins anew after a while (%s)", reason)


def this_host() -> Hosts:
    """This machine alone."""
    return Hosts(mesh=monarch.actor.this_host(), hosts=[local_host()])


async def attach(workers: list[str], *, timeout_s: float, config_file: str | None = None) -> Hosts:
    """Connects to the workers that listen at these addresses, tcp://HOST:PORT. `["job"]` means the workers of the job
    that this process belongs to (`torchtitan_rl.launch.jobs`). Call before anything else uses Monarch. `config_file` is
    the file that the run's config was read from.

    Raises ValueError for an address of another form or of a loopback, and for hosts that disagree about code, config
    or time (`launch.agreement`); RuntimeError naming a worker that cannot be reached within `timeout_s`.
    """
    leases: dict[int, Lease] = {}
    if workers == ["job"]:
        mesh, addresses, own = await deadline(asyncio.to_thread(_job_mesh), timeout_s, "hosts=job: attach"), None, ""
    else:
        mesh, leases, own = await _attached(workers, timeout_s)
        addresses = [worker.removeprefix("tcp://") for worker in workers]
    config_file = str(Path(config_file).resolve()) if config_file else None
    try:
        await deadline(mesh.initialized, timeout_s, f"hosts={','.join(workers)}: attach")
        hosts = await _probe(mesh, addresses, timeout_s, config_file)
    except BaseException:  # clean up and raise: the workers wait for another controller at once
        await asyncio.gather(*(asyncio.to_thread(lease.end) for lease in leases.values()))
        raise
    return Hosts(mesh=mesh, hosts=hosts, attached=True, config_file=config_file, leases=leases, own=own)


def _job_mesh() -> Any:
    from monarch.job import DEFAULT_JOB_PATH, job_load

    try:
        return job_load().state().hosts
    except FileNotFoundError:
        raise ValueError(
            f"hosts=job: there is no {DEFAULT_JOB_PATH} here; torchtitan_rl.launch.jobs makes it"
        ) from None


async def _attached(workers: list[str], timeout_s: float) -> tuple[Any, dict[int, Lease], str]:
    """Monarch's mesh of the workers' hosts, the leases, and where the hosts reach this process."""
    own = os.environ.get(HOST_ADDRESS) or address_towards(*split(workers[0]))
    if problem := workers_problem(workers, own):
        raise ValueError(problem)
    if len(set(workers)) < len(workers):
        raise ValueError(f"hosts={','.join(workers)}: a worker is named twice; a host needs one worker")
    await asyncio.gather(*(_listening(worker, timeout_s) for worker in workers))
    monarch.actor.enable_transport(f"tcp://{own}:0")
    monarchs = await _monarchs(workers, timeout_s)
    mesh = monarch.actor.attach_to_workers(ca="trust_all_connections", workers=monarchs)
    pairs = enumerate(zip(workers, monarchs, strict=True))
    return mesh, {index: Lease(*split(worker), at) for index, (worker, at) in pairs}, own


async def _attach_one(worker: str, timeout_s: float, config_file: str | None) -> tuple[Any, str, Host]:
    """(Monarch's mesh, where the worker's Monarch listens, the host) of one worker, for a process that has attached to
    others before. Raises ValueError for a host that disagrees with this one."""
    address, monarchs = worker.removeprefix("tcp://"), await _monarchs([worker], timeout_s)
    mesh = monarch.actor.attach_to_workers(ca="trust_all_connections", workers=monarchs)
    await deadline(mesh.initialized, timeout_s, f"host {address}: attach")
    (host,) = await _probe(mesh, [address], timeout_s, config_file)
    return mesh, monarchs[0], host


async def _monarchs(workers: list[str], timeout_s: float) -> list[str]:
    """Where the Monarch of each worker listens, once nothing is left there of a controller that is dead. Raises
    RuntimeError for a worker that does not say it."""

    async def ask(worker: str) -> str:
        end = time.monotonic() + timeout_s
        while True:
            try:
                if monarch_at := await asyncio.to_thread(ask_to_attach, *split(worker)):
                    return monarch_at
            except OSError as error:
                # The worker was there a moment ago. Between its old program and its new one nobody listens, and who
                # had connected to the old one is cut off.
                between = isinstance(error, ConnectionRefusedError | ConnectionResetError)
                if not between or time.monotonic() > end:
                    raise RuntimeError(
                        f"hosts={worker}: is no worker of torchtitan_rl ({error}); start it with "
                        f"`python -m torchtitan_rl.launch.worker {worker}`"
                    ) from None
                await asyncio.sleep(0.1)
            await _listening(worker, timeout_s)

    return await asyncio.gather(*(ask(worker) for worker in workers))


async def _probe(mesh: Any, addresses: list[str] | None, timeout_s: float, config_file: str | None) -> list[Host]:
    """The cores and GPUs of each host. Without `addresses`, each host answers with its own name. Raises ValueError for
    a host that disagrees with this one."""
    procs = mesh.spawn_procs(per_host={"gpus": 1}, name="probe")
    actors = procs.spawn("probe", HostProbe)
    ours = facts(config_file)

    async def ask(index: int) -> Host:
        label, actor = f"host {addresses[index] if addresses else index}: probe", actors.slice(hosts=index)
        host = await deadline(actor.host.call_one(addresses[index] if addresses else None), timeout_s, label)
        before = time.time()
        theirs = await deadline(actor.facts.call_one(config_file), timeout_s, label)
        if problem := disagreement(host.address, ours, theirs, config_file, (before, time.time())):
            raise ValueError(problem)
        return host

    try:
        return await asyncio.gather(*(ask(index) for index in range(mesh.region.slice().sizes[0])))
    finally:
        try:
            await deadline(procs.stop("answered"), timeout_s, "hosts: stop of the probes")
        except RuntimeError as error:  # of a host that has failed to answer, which is what has to be told
            logger.warning("%s", error)


async def _stopped(mesh: Any) -> None:
    await mesh.stop()


async def _listening(worker: str, timeout_s: float) -> None:
    """Waits until a worker, which may still be starting, accepts connections. Raises RuntimeError after `timeout_s`."""
    end = asyncio.get_running_loop().time() + timeout_s
    while error := await _unreachable(worker):
        if asyncio.get_running_loop().time() > end:
            raise RuntimeError(
                f"hosts: no worker answers at {worker} within {timeout_s:g} s ({error}); start it there "
                f"with `python -m torchtitan_rl.launch.worker {worker}`, or look at its output"
            )
        await asyncio.sleep(0.2)


async def _unreachable(worker: str) -> str:
    """Why no connection to a worker can be made; "" when one can."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*split(worker)), _CONNECT_S)
    except (OSError, TimeoutError) as error:
        return str(error) or f"no connection within {_CONNECT_S:g} s"
    writer.close()
    return ""

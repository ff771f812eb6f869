"""Connecting to the Monarch workers of other hosts. There is no authentication: use private interfaces."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import monarch.actor

from torchtitan_rl import adapters
from torchtitan_rl.dispatch.role_mesh import deadline
from torchtitan_rl.hosts.host_probe import HostProbe
from torchtitan_rl.hosts.inventory import Host, address_towards, local_host

__all__ = ["Hosts", "this_host", "attach"]

adapters.configure_monarch()

_CONNECT_S = 3.0


@dataclass(kw_only=True)
class Hosts:
    """The machines of a run: Monarch's mesh of hosts, and the cores and GPUs of each host."""

    mesh: Any
    hosts: list[Host]
    attached: bool = False
    """Whether the run's processes belong to the Monarch workers of their hosts, and not to this process."""

    async def lost(self) -> list[str]:
        """Addresses of the hosts whose worker does not answer; [] unless `attached`."""
        if not self.attached:
            return []
        errors = await asyncio.gather(*(_unreachable(f"tcp://{host.address}") for host in self.hosts))
        return [host.address for host, error in zip(self.hosts, errors, strict=True) if error]


def this_host() -> Hosts:
    """This machine alone."""
    return Hosts(mesh=monarch.actor.this_host(), hosts=[local_host()])


async def attach(workers: list[str], *, timeout_s: float) -> Hosts:
    """Connects to the workers that listen at these addresses, tcp://HOST:PORT. `["job"]` means the workers of the job
    that this process belongs to (`torchtitan_rl.hosts.jobs`). Call before anything else uses Monarch.

    Raises ValueError for an address of another form, RuntimeError naming a worker that cannot be reached within
    `timeout_s`.
    """
    if workers == ["job"]:
        mesh, addresses = await deadline(asyncio.to_thread(_job_mesh), timeout_s, "hosts=job: attach"), None
    else:
        mesh, addresses = await _attached(workers, timeout_s), [_address(worker) for worker in workers]
    await deadline(mesh.initialized, timeout_s, f"hosts={','.join(workers)}: attach")
    return Hosts(mesh=mesh, hosts=await _probe(mesh, addresses, timeout_s), attached=True)


def _job_mesh() -> Any:
    from monarch.job import DEFAULT_JOB_PATH, job_load

    try:
        return job_load().state().hosts
    except FileNotFoundError:
        raise ValueError(f"hosts=job: there is no {DEFAULT_JOB_PATH} here; torchtitan_rl.hosts.jobs makes it") from None


async def _attached(workers: list[str], timeout_s: float) -> Any:
    for worker in workers:
        _split(worker)
    if len(set(workers)) < len(workers):
        raise ValueError(f"hosts={','.join(workers)}: a worker is named twice; a host needs one worker")
    await asyncio.gather(*(_listening(worker, timeout_s) for worker in workers))
    own = os.environ.get("TORCHTITAN_RL_HOST_ADDRESS") or address_towards(*_split(workers[0]))
    monarch.actor.enable_transport(f"tcp://{own}:0")
    return monarch.actor.attach_to_workers(ca="trust_all_connections", workers=workers)


async def _probe(mesh: Any, addresses: list[str] | None, timeout_s: float) -> list[Host]:
    """The cores and GPUs of each host. Without `addresses`, each host answers with its own name."""
    procs = mesh.spawn_procs(per_host={"gpus": 1}, name="probe")
    actors = procs.spawn("probe", HostProbe)
    hosts = await asyncio.gather(
        *(
            deadline(
                actors.slice(hosts=index).host.call_one(addresses[index] if addresses else None),
                timeout_s,
                f"host {addresses[index] if addresses else index}: probe",
            )
            for index in range(mesh.region.slice().sizes[0])
        )
    )
    await deadline(procs.stop("answered"), timeout_s, "hosts: stop of the probes")
    return hosts


async def _listening(worker: str, timeout_s: float) -> None:
    """Waits until a worker, which may still be starting, accepts connections. Raises RuntimeError after `timeout_s`."""
    end = asyncio.get_running_loop().time() + timeout_s
    while error := await _unreachable(worker):
        if asyncio.get_running_loop().time() > end:
            raise RuntimeError(
                f"hosts: no worker answers at {worker} within {timeout_s:g} s ({error}); start it there "
                f"with `python -m torchtitan_rl.hosts.worker {worker}`, or look at its output"
            )
        await asyncio.sleep(0.2)


async def _unreachable(worker: str) -> str:
    """Why no connection to a worker can be made; "" when one can."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(*_split(worker)), _CONNECT_S)
    except (OSError, TimeoutError) as error:
        return str(error) or f"no connection within {_CONNECT_S:g} s"
    writer.close()
    return ""


def _address(worker: str) -> str:
    return worker.removeprefix("tcp://")


def _split(worker: str) -> tuple[str, int]:
    host, _, port = _address(worker).rpartition(":")
    if not worker.startswith("tcp://") or not host or not port.isdigit():
        raise ValueError(f"hosts={worker!r}: is not the address of a worker; write tcp://HOST:PORT")
    return host, int(port)

"""A run does what `torchtitan-rl scale` and the jobs of joining hosts ask for in its directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from torchtitan_rl.dispatch.role_mesh import describe
from torchtitan_rl.launch.joined_hosts import JoinedHosts
from torchtitan_rl.launch.replicas import Replicas
from torchtitan_rl.record import replica_request
from torchtitan_rl.record.replica_request import ScaleRequest

__all__ = ["scaled_on_request"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5


@asynccontextmanager
async def scaled_on_request(replicas: Replicas | None, hosts: JoinedHosts | None, run: Path) -> AsyncIterator[None]:
    """Does what is asked for in the directory of a run, as long as the block runs. Refuses everything where `replicas`
    is None, and hosts where `hosts` is."""
    replica_request.open_for(run, [] if hosts is None else hosts.addresses())
    watch = asyncio.ensure_future(_watch(replicas, hosts, run))
    try:
        yield
    finally:
        watch.cancel()
        if hosts is not None:
            hosts.close()
        replica_request.close(run)
        await asyncio.wait([watch])


async def _watch(replicas: Replicas | None, hosts: JoinedHosts | None, run: Path) -> None:
    """Requests are done side by side: a replica takes most of a minute to start, and a host that leaves has less."""
    tasks: dict[str, asyncio.Task] = {}

    async def do(request: ScaleRequest) -> None:
        problem = await _problem(replicas, hosts, request)
        replica_request.answer(run, request, 0 if replicas is None else replicas.number, problem)

    try:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                for request in replica_request.requests_in(run):
                    if request.id not in tasks:
                        tasks[request.id] = asyncio.ensure_future(do(request))
            except (OSError, ValueError) as error:
                logger.warning("a request for other replicas was not read: %s", error)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def _problem(replicas: Replicas | None, hosts: JoinedHosts | None, request: ScaleRequest) -> str:
    """Does what a request asks for. Returns why that is not done, "" where it is."""
    workers = [*request.join, *request.leave]
    wish = f"hosts={','.join(workers)}" if workers else f"replicas={request.replicas}"
    if replicas is None:
        return (
            f"{wish}: the number of replicas is fixed in this run, whose roles share devices or whose generator is not "
            "a mesh of its own; begin one with roles.colocation='none' and --backend actors"
        )
    if workers and hosts is None:
        return (
            f"{wish}: the run's processes listen on this machine alone, or are a job of Kubernetes; begin the run with "
            "--hosts and the address of a worker on each of its machines, or as a job of Slurm"
        )
    try:
        if hosts is None or not workers:
            await replicas.scale(request.replicas or 0)
        else:
            changes = [*map(hosts.join, request.join), *map(hosts.leave, request.leave)]
            errors = await asyncio.gather(*changes, return_exceptions=True)
            for error in filter(None, errors):
                raise error
    except (RuntimeError, ValueError) as error:
        return str(error)
    except Exception as error:  # who asked waits for an answer, whatever has happened
        logger.exception("%s: was not done", wish)
        return f"{wish}: {describe(error)}"
    return ""

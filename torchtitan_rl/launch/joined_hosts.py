"""Hosts that join a run which goes on, with generator replicas of their own, and leave it."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.inventory import Host
from torchtitan_rl.launch.preflight import host_problem
from torchtitan_rl.launch.replicas import Replicas

if TYPE_CHECKING:
    from torchtitan_rl.launch.attach import Hosts

__all__ = ["JoinedHosts"]

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2


class HostLauncher(Protocol):
    """What has replicas on hosts: `actors.ActorLauncher`, and a stand-in of the tests."""

    hosts: Hosts
    start_timeout_s: float

    def add_host(self) -> None:
        """Replicas may be on the next one of `hosts`, which has joined."""

    def close_host(self, index: int) -> None:
        """No replica starts on a host any more, nor is one replaced there."""

    async def remove_host(self, index: int) -> None:
        """A joined host has left or is gone, and with it what is there of the run."""

    def replicas_on(self, index: int) -> list[str]:
        """The replicas on a host, also those that start, and lost ones."""


class JoinedHosts:
    """Connects a run to hosts that it did not begin with, and lets go of them.

    A host that joins is compared with the controller's as at a start, and begins as many replicas as its GPUs carry,
    one without GPUs. A host leaves when it is asked for, or when its worker says so because a scheduler wants the host
    back: its replicas answer the requests that they have for as long as there is time, and others answer the rest. A
    host that is gone without a word has lost its replicas, and nothing replaces them.
    """

    def __init__(self, launcher: HostLauncher, replicas: Replicas, config: RunConfig) -> None:
        self._launcher, self._replicas, self._config = launcher, replicas, config
        self._joining: set[str] = set()
        """The workers whose hosts are joining."""
        self._adding: dict[int, asyncio.Future[None]] = {}
        """By the index of a host: the start of its replicas."""
        self._leaving: dict[int, asyncio.Task[None]] = {}
        self._hurry: dict[int, asyncio.Event] = {}
        """By the index of a host: set once there is no time left for its requests."""

    def addresses(self) -> list[str]:
        """HOST:PORT of the workers of all hosts of the run."""
        hosts = self._launcher.hosts
        return [hosts.hosts[index].address for index in hosts.present()]

    async def join(self, worker: str) -> None:
        """The host of the worker tcp://HOST:PORT joins, and its replicas serve. Raises ValueError for a host that
        cannot take part in the run, RuntimeError where the host or its replicas do not start: it has not joined
        then."""
        if self._config.weight_sync.transport == "shared_memory":
            raise ValueError(
                f"hosts={worker}: weight_sync.transport='shared_memory' carries weights on one host only; begin the "
                "run with 'auto' or 'store'"
            )
        if worker in self._joining:
            raise ValueError(f"hosts={worker}: is joining already; wait for it")
        self._joining.add(worker)
        try:
            await self._join(worker)
        finally:
            self._joining.discard(worker)

    async def _join(self, worker: str) -> None:
        hosts, loop = self._launcher.hosts, asyncio.get_running_loop()

        def on_leave(index: int, within_s: float) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._leave_within, index, within_s)

        index = await hosts.join(worker, self._launcher.start_timeout_s, on_leave)
        self._launcher.add_host()
        host = hosts.hosts[index]
        try:
            number = num_replicas(host, hosts.hosts[0], self._config)
            adding = self._adding[index] = asyncio.ensure_future(self._replicas.add(number, host=index))
            try:
                await asyncio.wait([adding])
            finally:
                adding.cancel()
            if adding.cancelled():
                raise RuntimeError(f"host {host.address}: had to leave before its replicas served")
            adding.result()
        except BaseException:  # clean up and raise: the worker waits for another run
            await self._launcher.remove_host(index)
            raise
        finally:
            self._adding.pop(index, None)
        event = {"event": "host_joined", "who": host.address}
        logger.warning("host %s has joined with %d replicas", host.address, number, extra=event)

    async def leave(self, worker: str) -> None:
        """The host of a worker leaves once its replicas have answered the requests that they have. Raises ValueError
        for a host that has not joined, RuntimeError where the run has no other replica."""
        hosts = self._launcher.hosts
        index = next((i for i in hosts.joined if f"tcp://{hosts.hosts[i].address}" == worker), None)
        if index is None:
            joined = ", ".join(f"tcp://{hosts.hosts[i].address}" for i in sorted(hosts.joined)) or "none"
            raise ValueError(f"hosts={worker}: has not joined this run (joined hosts: {joined}); only those may leave")
        await asyncio.shield(self._leave_once(index))

    def close(self) -> None:
        """The run ends: no host is waited for."""
        for task in self._leaving.values():
            task.cancel()

    def _leave_within(self, index: int, within_s: float) -> None:
        """The worker of a host has said, perhaps not for the first time, that the host leaves in so many seconds."""
        if index in self._launcher.hosts.joined:
            task = self._leave_once(index)
            task.get_loop().call_later(within_s, self._hurry[index].set)

    def _leave_once(self, index: int) -> asyncio.Task[None]:
        if index not in self._leaving or self._leaving[index].done():
            self._hurry[index] = asyncio.Event()
            task = self._leaving[index] = asyncio.ensure_future(self._leave(index))
            task.add_done_callback(_read)
        return self._leaving[index]

    async def _leave(self, index: int) -> None:
        launcher, replicas, hurry = self._launcher, self._replicas, self._hurry[index]
        address = launcher.hosts.hosts[index].address
        if not set(self._not_lost()) - set(launcher.replicas_on(index)):
            raise RuntimeError(f"host {address}: has the run's only replicas; add others first (--replicas, --join)")
        logger.warning("host %s leaves", address)
        launcher.close_host(index)
        if index in self._adding:
            self._adding[index].cancel()
            while index in self._adding:  # `_join` lets go of the host
                await asyncio.sleep(_LOOK_EVERY_S)
        while here := [role for role in launcher.replicas_on(index) if role in self._not_lost()]:
            serving = [role for role in replicas.serving() if role in here]
            if serving and len(serving) < len(replicas.serving()):
                await asyncio.gather(*(replicas.end(role, hurry) for role in serving), return_exceptions=True)
            elif hurry.is_set():
                break
            else:
                await asyncio.sleep(_LOOK_EVERY_S)
        if index in launcher.hosts.joined:
            await launcher.remove_host(index)
        logger.warning("host %s has left", address, extra={"event": "host_left", "who": address})

    def _not_lost(self) -> list[str]:
        """Roles of the replicas that serve or are to."""
        return [*self._replicas.serving(), *self._replicas.coming()]


def num_replicas(host: Host, first: Host, config: RunConfig) -> int:
    """How many replicas a host that joins begins, where `first` is a host of the run. Raises ValueError for a host that
    carries none."""
    if problem := host_problem(host):
        raise ValueError(problem)
    degree = config.generator.tensor_parallel_degree
    if bool(host.devices) != bool(first.devices):
        with_gpus, without = (host, first) if host.devices else (first, host)
        raise ValueError(
            f"host {host.address}: {with_gpus.address} has GPUs and {without.address} has none; join hosts like those "
            "of the run"
        )
    if host.devices and len(host.devices) < degree:
        raise ValueError(
            f"host {host.address}: has {len(host.devices)} GPUs, and a replica needs "
            f"generator.tensor_parallel_degree={degree}; join a larger host"
        )
    return len(host.devices) // degree if host.devices else 1


def _read(leaving: asyncio.Task[None]) -> None:
    """An error of a host that a scheduler takes back has nobody to tell it to."""
    if not leaving.cancelled() and (error := leaving.exception()) is not None:
        logger.warning("a host did not leave in order: %s", error)

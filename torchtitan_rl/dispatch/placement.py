"""Which roles share devices, and what of each is on them now.

Roles that share devices take turns. Before an operation, everything of the others leaves the device, then what
the operation needs and is not there yet is brought in; nothing else moves. Roles that share nothing never wait here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager

from torchtitan_rl.actors.operations import NEEDS, parts_of
from torchtitan_rl.config.run import COLOCATION
from torchtitan_rl.dispatch.role_mesh import RoleMesh, WorkerLost

__all__ = ["Placement"]

logger = logging.getLogger(__name__)

# While generators pull, the publisher's model may stay: it leaves when the KV cache needs the room.
_MAY_STAY = {"pull": {"policy": ("model",)}}


class Placement:
    """Residency of every role. `on_device[role]` is what is there; `history` the last moves, oldest first."""

    def __init__(self, colocation: str = "none"):
        if colocation not in COLOCATION:
            raise ValueError(f"colocation={colocation!r}: is not known; use one of {', '.join(COLOCATION)}")
        self._sharing = COLOCATION[colocation]
        self._meshes: dict[str, list[RoleMesh]] = {}
        self._parts: dict[str, tuple[str, ...]] = {}
        self.on_device: dict[str, set[str]] = {}
        self.history: deque[tuple[str, str, str]] = deque(maxlen=1000)
        """(role, "load" or "offload", part)."""
        self._queue: deque[object] = deque()
        self._active: list[str] = []
        """Roles with an operation under way; more than one only of the generator."""
        self._changed = asyncio.Condition()
        self._moving = asyncio.Lock()

    def shares(self, role: str) -> bool:
        """Whether this role takes turns with others."""
        return role in self._sharing

    def add(self, role: str, meshes: list[RoleMesh]) -> None:
        """Registers a role that has just started, all of it on the device."""
        parts = parts_of(role)
        self._meshes[role], self._parts[role], self.on_device[role] = list(meshes), parts, set(parts)

    async def evict(self, role: str) -> None:
        """Takes everything of a role off the device, to make room for the next one to start."""
        async with self._moving:
            await self._offload(role, self._parts[role])

    def run(self, role: str, operation: str, call: Callable[[], asyncio.Future]) -> asyncio.Future:
        """Makes a call that returns a future, in the order of the calls to `run`; at once where nothing is shared."""
        if not self.shares(role):
            return call()
        ticket = self._enqueue()

        async def in_turn():
            async with self._turn(ticket, role, operation):
                return await call()

        future = asyncio.ensure_future(in_turn())
        future.add_done_callback(lambda _: self._withdraw(ticket))
        return future

    @asynccontextmanager
    async def turn(self, role: str, operation: str):
        """The devices, holding what `operation` needs, for as long as the block runs."""
        if not self.shares(role):
            yield
            return
        async with self._turn(self._enqueue(), role, operation):
            yield

    def _enqueue(self) -> object:
        ticket = object()
        self._queue.append(ticket)
        return ticket

    def _withdraw(self, ticket: object) -> None:
        """For a call that was cancelled before it began to wait."""
        if ticket in self._queue:
            self._queue.remove(ticket)
            asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def _turn(self, ticket: object, role: str, operation: str):
        admitted = False
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._queue[0] is ticket and self._admits(role))
                self._queue.popleft()
                self._active.append(role)
                admitted = True
                self._changed.notify_all()
            async with self._moving:
                await self._prepare(role, operation)
            yield
        finally:  # nothing here may wait before the books are right: a cancellation would leave them wrong
            if admitted:
                self._active.remove(role)
            else:
                self._queue.remove(ticket)
            await asyncio.shield(self._notify())

    def _admits(self, role: str) -> bool:
        return not self._active or (role == "generator" and set(self._active) == {"generator"})

    async def _prepare(self, role: str, operation: str) -> None:
        for other in self._sharing:
            if other != role and other in self._meshes:
                stay = _MAY_STAY.get(operation, {}).get(other, ())
                await self._offload(other, [part for part in self._parts[other] if part not in stay])
        if operation == "push_weights" and self.shares("generator"):
            await self._offload(role, ["gradients", "optimizer"])  # the generators will wake beside this model
        await self._load(role, [part for part in self._parts[role] if part in NEEDS[operation]])

    async def _offload(self, role: str, parts) -> None:
        gone = [part for part in parts if part in self.on_device[role]]
        if not gone:
            return
        if role == "generator":
            await self._on_generators("sleep")
        else:
            for mesh in self._meshes[role]:
                await mesh.call_all("offload", gone)
        self._moved(role, "offload", gone)
        self.on_device[role] -= set(gone)

    async def _load(self, role: str, parts) -> None:
        missing = [part for part in parts if part not in self.on_device[role]]
        if not missing:
            return
        if role == "generator":
            for part in missing:
                await self._on_generators("wake", part)
        else:
            for mesh in self._meshes[role]:
                await mesh.call_all("onload", missing)
        self._moved(role, "load", missing)
        self.on_device[role] |= set(missing)

    async def _on_generators(self, endpoint: str, *args) -> None:
        """On every replica; one whose process has died holds nothing any more. Raises WorkerLost when none is left."""
        for mesh in list(self._meshes["generator"]):
            try:
                await mesh.call_leader(endpoint, *args)
            except WorkerLost as error:
                self._meshes["generator"].remove(mesh)
                logger.warning("%s takes no more turns: %s", mesh.role, error)
                if not self._meshes["generator"]:
                    raise

    def _moved(self, role: str, move: str, parts: list[str]) -> None:
        self.history.extend((role, move, part) for part in parts)
        logger.debug("%s: %s %s", role, move, ", ".join(parts))

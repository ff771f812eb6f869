"""Which roles share devices, and which parts of each role are on the devices now.

Roles that share devices take turns. Before an operation, all parts of the other roles leave the devices. Then the parts
that the operation needs are loaded, where they are missing. Nothing else moves. A role that shares no device never
waits here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import asynccontextmanager

from torchtitan_rl.actors.operations import (
    GeneratorOperations,
    Operation,
    TrainerOperations,
    device_parts,
    needed_parts,
)
from torchtitan_rl.config.run import COLOCATION
from torchtitan_rl.dispatch.role_mesh import RoleMesh, WorkerLost

__all__ = ["Placement"]

logger = logging.getLogger(__name__)

# A pull needs the generators' weights beside the policy's model, which leaves when the KV cache needs memory.
_MAY_STAY: dict[Operation, dict[str, tuple[str, ...]]] = {GeneratorOperations.load: {"policy": ("model",)}}


class Placement:
    """Residency of every role. `on_device[role]` names the role's parts on the devices; `history` lists the last 1000
    moves, oldest first."""

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
        """Roles with an operation under way, once per operation. Only the generator's operations overlap."""
        self._changed = asyncio.Condition()
        self._moving = asyncio.Lock()

    def shares(self, role: str) -> bool:
        """Whether `role` takes turns with other roles."""
        return role in self._sharing

    def add(self, role: str, meshes: list[RoleMesh]) -> None:
        """Registers a role that has just started, with all its parts on the devices."""
        parts = device_parts(role)
        self._meshes[role], self._parts[role], self.on_device[role] = list(meshes), parts, set(parts)

    async def evict(self, role: str) -> None:
        """Offloads all parts of a role, to make room for the next role to start."""
        async with self._moving:
            await self._offload(role, self._parts[role])

    def run(self, role: str, operation: Operation, call: Callable[[], asyncio.Future]) -> asyncio.Future:
        """Makes `call` when the role's turn comes; turns follow the order of calls to `run` and `turn`. A role that
        shares no device calls at once."""
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
    async def turn(self, role: str, operation: Operation):
        """Runs the block in the role's turn, with the parts that `operation` needs on the devices."""
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
        """Takes the ticket of a cancelled call out of the queue, if the call had not begun to wait."""
        if ticket in self._queue:
            self._queue.remove(ticket)
            asyncio.ensure_future(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def _turn(self, ticket: object, role: str, operation: Operation):
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
        finally:  # no await before `_active` and `_queue` are right: a cancellation would leave them wrong
            if admitted:
                self._active.remove(role)
            else:
                self._queue.remove(ticket)
            await asyncio.shield(self._notify())

    def _admits(self, role: str) -> bool:
        return not self._active or (role == "generator" and set(self._active) == {"generator"})

    async def _prepare(self, role: str, operation: Operation) -> None:
        for other in self._sharing:
            if other != role and other in self._meshes:
                stay = _MAY_STAY.get(operation, {}).get(other, ())
                await self._offload(other, [part for part in self._parts[other] if part not in stay])
        if operation is TrainerOperations.push_weights and self.shares("generator"):
            await self._offload(role, ["gradients", "optimizer"])  # the generators will wake beside this model
        await self._load(role, [part for part in self._parts[role] if part in needed_parts(operation)])

    async def _offload(self, role: str, parts) -> None:
        gone = [part for part in parts if part in self.on_device[role]]
        if not gone:
            return
        if role == "generator":
            await self._on_generators(GeneratorOperations.sleep)
        else:
            for mesh in self._meshes[role]:
                await mesh.call_all(TrainerOperations.offload, gone)
        self._moved(role, "offload", gone)
        self.on_device[role] -= set(gone)

    async def _load(self, role: str, parts) -> None:
        missing = [part for part in parts if part not in self.on_device[role]]
        if not missing:
            return
        if role == "generator":
            for part in missing:
                await self._on_generators(GeneratorOperations.wake, part)
        else:
            for mesh in self._meshes[role]:
                await mesh.call_all(TrainerOperations.onload, missing)
        self._moved(role, "load", missing)
        self.on_device[role] |= set(missing)

    async def _on_generators(self, operation: Operation, *args) -> None:
        """Calls every replica. A replica whose process has died holds no memory and takes no more turns. Raises
        WorkerLost when no replica is left."""
        for mesh in list(self._meshes["generator"]):
            try:
                await mesh.call_leader(operation, *args)
            except WorkerLost as error:
                self._meshes["generator"].remove(mesh)
                event = {"event": "replica_out_of_turns", "who": mesh.role}
                logger.warning("%s takes no more turns: %s", mesh.role, error, extra=event)
                if not self._meshes["generator"]:
                    raise

    def _moved(self, role: str, move: str, parts: list[str]) -> None:
        self.history.extend((role, move, part) for part in parts)
        logger.debug("%s: %s %s", role, move, ", ".join(parts))

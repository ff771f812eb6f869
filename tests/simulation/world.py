"""The world of a simulated run: its clock, its processes, what goes wrong when, and a log of what really happened."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.engines import FakeReplica
from tests.simulation.tasks import Fault
from tests.simulation.trainers import FakeStore, FakeTrainer
from tests.simulation.virtual_clock import VirtualLoop
from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.role_mesh import ProcessDied
from torchtitan_rl.launch.actors import ActorLauncher
from torchtitan_rl.record.recorder import DrawEvents, Listener, Published, TrainedOn
from torchtitan_rl.types import Request, RolloutGroup

__all__ = ["Asked", "FakeLauncher", "Log", "Watch", "World"]

_IN_PLACE = ("step is skipped", "engine refuses requests", "environment fails")
"""Faults that do not depend on time: they strike an undisturbed run of the same seed too."""
_ONE_IN_TEN = 0.1


@dataclass(slots=True)
class Asked:
    """A request as the engine got it."""

    number: int
    stream: int
    """The request's seed, which names rollout and turn."""
    engine: FakeReplica
    began: float
    seconds: float
    num_tokens: int
    cut_off: bool
    refused: bool
    tokens: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


@dataclass
class Log:
    """What happened in one attempt at the run, as engines and trainer saw it, and what the controller recorded."""

    requests: list[Asked] = field(default_factory=list)
    delivered: set[int] = field(default_factory=set)
    """Streams whose answer has reached the client."""
    twice: list[str] = field(default_factory=list)
    """Requests that were sent once more while an engine in use had them, or after their answer."""
    named: list[tuple[int, list[int] | Exception]] = field(default_factory=list)
    """(version that a request named, versions that sampled its tokens or the error that it got)."""
    publications: list[int] = field(default_factory=list)
    trained: list[tuple[int, int, dict[int, list[int]]]] = field(default_factory=list)
    """(optimizer steps before, publications before, request -> its tokens that train) of each training sequence."""
    weights: dict[int, int] = field(default_factory=dict)
    """Optimizer steps -> the weights after them."""
    loaded: tuple[int, int, int] | None = None
    """(steps, version of the weights, version that the controller asked for) of the checkpoint that was loaded."""
    had_played: set[str] = field(default_factory=set)
    """The draws that had been played to their end when the loaded checkpoint was staged."""
    played: set[str] = field(default_factory=set)
    """These, and the draws that were played to their end in this attempt."""
    draws: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """(step, record of the ledger)."""
    not_staged: list[str] = field(default_factory=list)
    """Versions that an engine was to load without a fetch since its last load of the version."""
    misplaced: list[str] = field(default_factory=list)
    """Training sequences whose log-probabilities are those of another one."""
    faults: set[str] = field(default_factory=set)
    """Kinds of the faults that struck, in this attempt or at its expense."""
    num_faults: int = 0
    """Faults that struck in this attempt."""
    struck: set[str] = field(default_factory=set)
    """Roles of the replicas that a fault struck."""
    end: str = ""
    """`finished`, `killed`, or the error that ended the attempt."""
    error: Exception | None = None
    excused: bool = False
    """Whether a fault explains the error."""
    left: dict[str, Any] = field(default_factory=dict)
    """What the clients hold when everything has been answered."""
    places: dict[int, tuple[str, int]] | None = None
    """What `properties` makes of `draws`, once."""

    def explains_loss(self, error: str) -> bool:
        """Whether an error says that no replica is left, and each that it names was struck by a fault."""
        lost = set(re.findall(r"(generator-\d+): ", error))
        return "no generator replica is left" in error and ": healthy" not in error and lost <= self.struck


class World:
    """One run of a seed over all its attempts. `disturbed=False` leaves out the faults that depend on time."""

    def __init__(self, seed: int, faults: list[Fault], *, call_timeout_s: float, disturbed: bool = True) -> None:
        self.seed, self.call_timeout_s, self.disturbed = seed, call_timeout_s, disturbed
        self._random = random.Random(f"world/{seed}")
        self.scaling = random.Random(f"scaling/{seed}")
        """What is drawn about replicas that join and leave: apart, so that nothing else of a seed changes."""
        self.history: list[str] = []
        self.num_requests, self.killed, self._is_over = 0, False, False
        drawn = random.Random(f"skipped/{seed}")
        kinds = [fault.kind for fault in faults]
        self.refuses = "engine refuses requests" in kinds
        self.skipped_steps = {drawn.randrange(20) for kind in kinds if kind == "step is skipped"}
        self.faults = [fault for fault in faults if disturbed and fault.kind not in _IN_PLACE]
        self._to_fail: list[str] = []
        self.logs: list[Log] = []
        self.now = 0.0

    def begin_attempt(self, limit_s: float) -> None:
        """Starts the processes of another attempt."""
        self.loop = VirtualLoop(now=self.now, limit_s=self.now + limit_s)
        self.log, self.store, self.trainer = Log(), FakeStore(), FakeTrainer(self)
        self.pushing = asyncio.Event()
        self.logs.append(self.log)
        self.replicas: dict[str, FakeReplica] = {}
        self.client: MeshSamplingClient | None = None
        self._running: dict[int, Asked] = {}
        self.killed = self._is_over = False
        self.note(f"attempt {len(self.logs)}")

    def end_attempt(self) -> None:
        """Cancels what is left of the attempt; none of that is noted, and nothing goes wrong any more."""
        self._is_over = True
        self.now, self.log, self.faults, left = self.loop.time(), Log(), [], self.faults
        self.loop.run_to_the_end()
        self.faults = left

    def between(self, least: float, most: float) -> float:
        return self._random.uniform(least, most)

    def note(self, text: str) -> None:
        self.history.append(f"{self.loop.time():9.2f}  {text}")

    def excuses(self, error: str) -> bool:
        """Whether a fault that has struck explains why an attempt ended."""
        said = {"trainer dies": "policy-0: its process died", "fetch fails": "fetch fails"}
        said |= {"checkpoint is not written": "checkpoint could not be written"}
        return self.log.explains_loss(error) or any(k in self.log.faults and text in error for k, text in said.items())

    # What engines tell.

    def asked(self, request: Request, engine: FakeReplica) -> Asked:
        """Notes a request that an engine begins with."""
        params, stream = request.params, request.params.seed
        num_tokens = 1 + stream // 7 % params.max_tokens
        pace = self.between(0.05, 0.4) * (8 if stream % 10 == 0 else 1)  # one in ten is long
        refused = self.refuses and stream // 1000 % 41 == 0
        asked = Asked(
            self.num_requests, stream, engine, self.loop.time(), num_tokens * pace, num_tokens,
            num_tokens == params.max_tokens, refused,
        )  # fmt: skip
        before = self._running.get(stream)
        if before is not None and self._in_use(before.engine):
            self.log.twice.append(f"request {stream}: sent to {engine.role} while {before.engine.role} has it")
        if stream in self.log.delivered:
            self.log.twice.append(f"request {stream}: sent to {engine.role} although it has been answered")
        self._running[stream] = asked
        self.log.requests.append(asked)
        while self.faults and self.faults[0].at <= self.num_requests:
            fault = self.faults.pop(0)
            self.loop.call_later(fault.delay, self._strike, fault)
        self.num_requests += 1
        return asked

    def answered(self, asked: Asked) -> None:
        """Notes an answer that reaches the client."""
        self._running.pop(asked.stream, None)
        self.log.delivered.add(asked.stream)

    def cancelled(self, asked: Asked) -> None:
        """Notes a request that an engine gives up."""
        self._running.pop(asked.stream, None)

    def watched(self, run_group: Callable[..., Awaitable[RolloutGroup]]) -> Callable[..., Awaitable[RolloutGroup]]:
        """`run_group`, which notes the draws that it has played to their end."""

        async def watched(*args: Any, group_id: str, **named: Any) -> RolloutGroup:
            log, group = self.log, await run_group(*args, group_id=group_id, **named)
            log.played.add(group_id)
            return group

        return watched

    def _in_use(self, engine: FakeReplica) -> bool:
        replicas = [] if self.client is None else self.client._replicas
        return any(replica.mesh is engine and replica.lost is None for replica in replicas)

    # Faults.

    def _strike(self, fault: Fault) -> None:
        if self.killed or self._is_over:
            return
        replicas = list(self.replicas.values())
        kind, replica = fault.kind, replicas[fault.replica % len(replicas)]
        self.note(f"fault: {kind}" + (f" ({replica.role})" if kind.startswith("replica ") else ""))
        self.log.faults.add(kind)
        self.log.num_faults += 1
        if kind.startswith("replica "):
            self.log.struck.add(replica.role)
        if kind == "replica dies":
            replica.die()
        elif kind in ("replica hangs", "replica answers late", "replica is slow"):
            replica.hang(fault.seconds)
        elif kind == "trainer dies":
            self.trainer.die()
        elif kind == "controller is killed":
            self.killed = True
            self.loop.stop()
        else:
            self._to_fail.append(kind)

    def may_fail(self, endpoint: str, engine: FakeReplica | None) -> None:
        """Raises what a fault that has struck has in store for the next call of the endpoint."""
        for kind in [kind for kind in self._to_fail if kind.startswith(endpoint)]:
            self._to_fail.remove(kind)
            self.log.faults.add(kind)
            self.note(f"{kind}" + (f": {engine.role}" if engine is not None else ""))
            if engine is not None:
                self.log.struck.add(engine.role)
            raise (ProcessDied if kind == "fetch is lost" else RuntimeError)(kind)


class Watch(Listener):
    """Notes in the world's log what the controller records."""

    def __init__(self, world: World) -> None:
        self.world, self.log = world, world.log

    def draws(self, event: DrawEvents) -> None:
        self.log.draws += [(event.step, record) for record in event.records]
        for record in event.records:
            self.world.note(f"draw {record['draw']} {record['event']}")

    def published(self, event: Published) -> None:
        self.world.note(f"version {event.version} is served")

    def trained(self, event: TrainedOn) -> None:
        for datum, logprobs_T in event.sequences:
            inputs = datum.loss_inputs
            if logprobs_T.tolist() != (inputs["sampling_logprobs"] * inputs["loss_mask"]).tolist():
                steps = self.world.trainer.num_calls
                self.log.misplaced.append(f"sequence of rollout {datum.rollout} in the batch before step {steps}")


class FakeLauncher(ActorLauncher):
    """Starts pretended processes. `restart_generator` is what a repair calls."""

    one_host, attached = True, False  # type: ignore[assignment]  # properties of a launcher of real processes

    def __init__(self, world: World) -> None:
        self.world, self.store = world, world.store

    async def start_trainer(self, *args: Any, **named: Any) -> Any:
        return self.world.trainer

    async def start_generator(self, config: Any, model: Any, *, role: str, **named: Any) -> Any:
        if self.world.client is not None:  # it joins a run that goes on
            await asyncio.sleep(self.world.scaling.uniform(2, 30))
            if self.world.scaling.random() < _ONE_IN_TEN:
                raise RuntimeError(f"{role}: its process did not start")
        self.world.replicas[role] = FakeReplica(self.world, role)
        return self.world.replicas[role]

    async def restart_generator(self, role: str) -> Any:
        self.world.replicas[role].dead = True
        await asyncio.sleep(self.world.between(2, 30))
        self.world.may_fail("replacement", self.world.replicas[role])
        self.world.note(f"{role} is replaced")
        self.world.replicas[role] = FakeReplica(self.world, role)
        return self.world.replicas[role]

    async def stop_generator(self, role: str) -> None:
        await asyncio.sleep(self.world.scaling.uniform(0.1, 5))
        if role in self.world.replicas:  # it had started
            self.world.replicas.pop(role).die()

    async def start_store(self) -> None:
        pass

    async def stop(self, timeout_s: float = 5.0) -> None:
        pass

    def kill(self) -> None:
        pass

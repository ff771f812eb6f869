"""Sampling and scoring over replicas of the generator."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from torchtitan_rl.actors.operations import GeneratorOperations, Operation
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.recorded_routes import RecordedRoutes
from torchtitan_rl.dispatch.repair import PlaceGone, Repair, TooManyRestarts, catch_up, end_processes, release_versions
from torchtitan_rl.dispatch.replica import Membership, Replica, ReplicaLost, VersionRefused
from torchtitan_rl.dispatch.role_mesh import RoleMesh, describe
from torchtitan_rl.dispatch.router import Router
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.versions import ServedVersions
from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.types import WITHOUT_ADAPTERS, Request

__all__ = ["MeshSamplingClient"]

logger = logging.getLogger(__name__)

_CLOSED = "sampling: the client was closed before the generators answered"

_Batch = list[tuple[Request, asyncio.Future]]
"""Requests that travel together, each with the future of its answer."""


class MeshSamplingClient(SamplingClient):
    """`sample`, `score` and `score_top` over all replicas. `SamplingClient` says what each method promises.

    Requests made in one iteration of the event loop travel together. The engine admits them in the order they were
    made, before its next iteration: the same requests give the same tokens. With several replicas a `Router` chooses a
    replica for each request.

    A replica is lost when its process or engine dies or a call passes its deadline. Its unanswered requests go to the
    healthy replicas; no replica gets a request twice. A request with a seed gets the same tokens from any replica on a
    CPU. On a GPU sums depend on the other sequences in the batch: log-probabilities are nearly equal, and tokens not
    always the same.
    """

    def __init__(
        self,
        replicas: list[RoleMesh],
        versions: ServedVersions,
        *,
        max_model_len: int,
        timeout_s: float,
        verify: bool = True,
        placement: Placement | None = None,
        repair: Repair | None = None,
        routes: RecordedRoutes | None = None,
        num_adapter_slots: int = 0,
        follows: bool = False,
    ):
        """`placement` gives generators their turns on shared devices; None: no role shares devices. `repair` replaces
        lost replicas; None: they stay lost. `routes`: a replay sends each request where it was; None: a router
        chooses. `num_adapter_slots`: versions of adapters that each engine serves side by side; 0: an engine serves one
        version of whole weights. `follows`: the engines follow a schedule."""
        super().__init__(versions, max_model_len=max_model_len)
        self._num_adapter_slots, self._follows = num_adapter_slots, follows
        self._placement, self._repair = placement, repair
        self._verify, self._timeout_s = verify, timeout_s
        self._router, self._routes = Router(len(replicas)), routes
        """The router counts nothing in a replay."""
        self._replicas = [self._new_replica(index, mesh) for index, mesh in enumerate(replicas)]
        self._progress = asyncio.Event()
        """Set when a leaving replica has answered a request, or is lost."""
        self._serving_indices = list(range(len(replicas)))
        """The replicas that get requests: they are not lost and do not leave. The list is replaced when that changes:
        the router looks at the replicas again only when it gets another list."""
        self._num_starting = 0
        """The blocks of `starting` under way."""
        self._replica_arrived = asyncio.Event()
        """Set when a replica has been replaced or has joined, or is not expected any more."""
        self._no_repair = ""
        """Why no replica is replaced any more; empty while replacements are possible."""
        self._is_probing = False
        self._pending: dict[int | None, _Batch] = defaultdict(list)
        """The requests of this iteration of the event loop, by the version they are pinned to."""
        self._waiting: list[tuple[_Batch, int | None]] = []
        """Requests that wait for a replica to come, with the version they are pinned to."""
        self._sent: dict[int, Replica] = {}
        """Number of a request -> the replica that it was sent to and that has not answered it."""
        self._cancelled: dict[Replica, list[int]] = defaultdict(list)
        """The numbers of sent requests whose callers have gone in this iteration of the event loop."""
        self._tasks: set[asyncio.Task] = set()
        self._closed = False

    def _new_replica(self, index: int, mesh: RoleMesh) -> Replica:
        on_load = partial(self._router.loaded, index)
        slots = self._num_adapter_slots
        return Replica(mesh, self._versions, self._verify, on_load, slots, follows=self._follows)

    def _members(self) -> list[Replica]:
        """The replicas that have not left."""
        return [replica for replica in self._replicas if replica.membership is not Membership.LEFT]

    # The state of the replicas.

    def health(self) -> dict[str, str]:
        return {replica.mesh.role: replica.lost or "healthy" for replica in self._members()}

    def working(self) -> list[str]:
        """Roles of the replicas that are healthy and do not leave, and of lost ones that are being replaced. A lost one
        that nothing replaces (`generator.max_replica_restarts=0`) is not among them."""
        staying = [replica for replica in self._replicas if replica.membership is Membership.MEMBER]
        return [replica.mesh.role for replica in staying if replica.lost is None or self._repair is not None]

    def abandoned(self) -> list[str]:
        """Roles of lost replicas that nothing replaces."""
        working = self.working()
        lost = [replica.mesh.role for replica in self._members() if replica.lost is not None]
        return [role for role in lost if role not in working]

    def serving(self) -> list[str]:
        """Roles of the replicas that get requests."""
        return [self._replicas[index].mesh.role for index in self._serving_indices]

    @property
    def num_restarts(self) -> int:
        """Attempts to replace a replica so far, with those of which the replacement did not start."""
        return 0 if self._repair is None else self._repair.num_restarts

    def in_flight(self) -> list[int]:
        return [0 if replica.lost else replica.unanswered for replica in self._members()]

    def stalls(self) -> list[float]:
        return [replica.stall_s for replica in self._members()]

    def request_times(self) -> dict[str, tuple[float, int]]:
        """{} where there was one replica only, and in a replay."""
        if len(self._replicas) == 1 or self._routes is not None:
            return {}
        times = zip(self._replicas, self._router.times(), strict=False)  # the router knows a replica that is joining
        return {replica.mesh.role: replica_times for replica, replica_times in times}

    def loaded_version(self) -> int | None:
        versions = {replica.loaded_version for replica in self._replicas if replica.lost is None}
        return versions.pop() if len(versions) == 1 else None

    async def profile(self, role: str, rank: int, file: str) -> None:
        replica = next(replica for replica in self._replicas if replica.mesh.role == role)
        await replica.mesh.call_rank(rank, GeneratorOperations.profile, file)

    async def weights(self) -> dict[str, torch.Tensor]:
        mesh = self._replicas[self._require_serving()[0]].mesh
        async with self._turn(GeneratorOperations.weights):
            return (await mesh.call_each(GeneratorOperations.weights))[0]

    # Versions.

    async def pull(self, version: int) -> None:
        if self._closed:
            raise RuntimeError(_CLOSED)
        if self._repair is not None and not self._is_probing:
            self._begin_probing(self._repair)
        async with self._turn(GeneratorOperations.load):
            previous, self._versions.served = self._versions.served, version
            if previous is not None:
                await self._versions.end_serving(previous)
            try:
                await self._on_all(lambda replica: replica.pull(version))
            except VersionRefused as error:
                self._versions.served = previous
                raise RuntimeError(str(error)) from error

    async def load_hf(self, directory: str, *, version: int = 0) -> None:
        self._versions.served = version
        await self._on_all(lambda replica: replica.load_hf(directory, version))

    async def _on_all(self, call: Callable[[Replica], Coroutine]) -> None:
        serving = await self._some_serving()
        replicas = [  # a list of its own: meanwhile another replica may take the place of one
            replica
            for index, replica in enumerate(self._replicas)
            if index in serving or replica.membership is Membership.LEAVING
        ]
        results = await asyncio.gather(*map(call, replicas), return_exceptions=True)
        loaded = any(result is None for result in results)
        for position, (replica, result) in enumerate(zip(replicas, results, strict=True)):
            if loaded and isinstance(result, VersionRefused):  # others hold the version: this replica is at fault
                results[position] = result = ReplicaLost(str(result))
            if isinstance(result, ReplicaLost):
                self._lose(replica, result)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ReplicaLost):
                raise result
        await self._some_serving()

    # Requests.

    async def _submit(self, request: Request, version: int | None):
        if self._closed:
            raise RuntimeError(_CLOSED)
        if self.policy_version is None:
            raise RuntimeError("policy_version=None: the generators hold no weights yet; publish and pull first")
        if version == WITHOUT_ADAPTERS and not self._num_adapter_slots:
            raise ValueError(
                f"policy_version={version}: means the base, and these generators hold no adapters beside one; set "
                "generator.max_adapters, or sample from a version"
            )
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if not self._pending[version]:
            # Two iterations of the event loop: requests of asyncio tasks that started in this iteration travel too.
            loop.call_soon(loop.call_soon, self._flush, version)
        self.num_requests += 1
        request.number = self.num_requests
        self._pending[version].append((request, future))
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(request.number)
            raise

    def _cancel(self, number: int) -> None:
        """Tells the replica that nobody waits for a request's answer any more. Not in a replay, whose engines follow
        the record in this too."""
        replica = self._sent.pop(number, None)
        if replica is None or self._routes is not None or self._follows or self._closed:
            return
        if not self._cancelled:
            asyncio.get_running_loop().call_soon(self._flush_cancelled)
        self._cancelled[replica].append(number)

    def _flush_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, defaultdict(list)
        for replica, numbers in cancelled.items():
            if replica.lost is None:
                self._start(replica.cancel(numbers))

    def _flush(self, version: int | None) -> None:
        self._dispatch(self._pending.pop(version), version)

    def _dispatch(self, batch: _Batch, version: int | None) -> None:
        """Sends each request to the replica that the router chooses. Where all are lost, keeps the requests while a
        replica is expected, and fails them otherwise."""
        if self._closed:
            return _fail(batch, RuntimeError(_CLOSED))
        batch = self._wanted(batch)
        if not batch:
            return
        if self._expects_replica():
            self._waiting.append((batch, version))
            return
        try:
            serving = self._require_serving()
        except RuntimeError as error:
            return _fail(batch, error)
        shares = self._route(batch, version, serving) if self._routes is None else _as_recorded(self._routes, batch)
        for index, share in shares.items():
            sending = self._start(running("hand requests and answers over", self._send(index, share, version)))
            sending.add_done_callback(partial(_fail_cancelled, share))

    def _wanted(self, batch: _Batch) -> _Batch:
        """The requests whose callers wait; in a replay all, because the record says what an engine gets."""
        if self._routes is not None or self._follows:
            return batch
        return [(request, future) for request, future in batch if not future.done()]

    def _route(self, batch: _Batch, version: int | None, serving: list[int]) -> dict[int, _Batch]:
        """Index of a replica -> its share of the requests."""
        version = _pinned(version)
        indices = self._router.route(
            [request.tokens for request, _ in batch],
            version,
            serving=serving,
            loaded_versions=() if version is None else [replica.loaded_version for replica in self._replicas],
            newest=self.policy_version,
        )
        shares: dict[int, _Batch] = defaultdict(list)
        for index, call in zip(indices, batch, strict=True):
            shares[index].append(call)
        return shares

    async def _send(self, index: int, batch: _Batch, version: int | None) -> None:
        """Answers the requests of a batch by one replica. Those that a lost replica leaves unanswered go to the healthy
        replicas; any other error is the answer to all of them."""
        replica, unanswered = self._replicas[index], len(batch)
        try:
            async with self._turn(GeneratorOperations.sample):
                wanted = self._wanted(batch)
                self._finished(index, len(batch) - len(wanted), version)
                batch, unanswered = wanted, len(wanted)
                if not batch:
                    return
                self._sent.update((request.number, replica) for request, _ in batch)
                async for answers in replica.sample([request for request, _ in batch], version, self._timeout_s):
                    for position, answer in answers:
                        self._answer(*batch[position], answer)
                    unanswered -= len(answers)
                    self._finished(index, len(answers), version)
        except ReplicaLost as error:
            self._lose(replica, error)
            self._finished(index, unanswered, version)
            self._dispatch([(request, future) for request, future in batch if not future.done()], version)
        except Exception as error:
            _fail(batch, error)
            self._finished(index, unanswered, version)
        except asyncio.CancelledError:
            _fail(batch, RuntimeError(_CLOSED))
            self._finished(index, unanswered, version)
            raise
        finally:
            for request, _ in batch:
                self._sent.pop(request.number, None)

    def _answer(self, request: Request, future: asyncio.Future, answer: Any) -> None:
        self._sent.pop(request.number, None)
        if future.done():
            return
        if isinstance(answer, ValueError):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        else:  # cancelled by the record that the engine follows: its caller goes here too, if not at the same moment
            parted = RuntimeError("sampling: in the record this request's caller had gone; the replay has parted")
            asyncio.get_running_loop().call_later(self._timeout_s, _fail, [(request, future)], parted)

    def _finished(self, index: int, num_requests: int, version: int | None) -> None:
        """Notes that a replica has answered requests, or never will."""
        if self._routes is None:
            self._router.finished(index, num_requests, _pinned(version))
        if self._replicas[index].membership is Membership.LEAVING:
            self._progress.set()

    def _start(self, work: Coroutine) -> asyncio.Future:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _turn(self, operation: Operation) -> AbstractAsyncContextManager:
        """The generators' turn on the devices for as long as the block runs; no wait where no role shares devices."""
        return nullcontext() if self._placement is None else self._placement.turn("generator", operation)

    def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for replica in self._replicas:
            replica.close()
        for batch, _ in self._waiting:
            _fail(batch, RuntimeError(_CLOSED))
        self._waiting.clear()

    # Replicas that join and leave.

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Where no replica is left, requests wait for those that are to join, as long as the block runs."""
        self._num_starting += 1
        try:
            yield
        finally:
            self._num_starting -= 1
            self._update_serving()
            self._send_waiting()

    async def join(self, mesh: RoleMesh) -> None:
        """One more replica. It loads the served version while the others serve, and gets requests from then on. Call it
        again only after it has returned. Raises RuntimeError, ValueError or ReplicaLost where the weights do not
        load."""
        left = (index for index, replica in enumerate(self._replicas) if replica.membership is Membership.LEFT)
        index = next(left, len(self._replicas))
        if index == len(self._router.loads):
            self._router.add()
        replica = self._new_replica(index, mesh)
        try:
            await catch_up(replica)
        except BaseException:
            replica.lost = "did not join"
            await replica.release()
            raise
        if index < len(self._replicas):
            self._replicas[index] = replica
        else:
            self._replicas.append(replica)
            if self._is_probing and self._repair is not None:
                self._start(self._repair.probe(partial(self._current, index), self._lose))
        self._update_serving()
        self._send_waiting()

    async def leave(self, role: str, hurry: asyncio.Event | None = None) -> None:
        """Takes a healthy replica out of use: it gets no further request, and has left once it has answered those that
        it has. Until then it loads what is published, as the others do. Once `hurry` is set, it has left at once, and
        others answer the rest. Raises RuntimeError for one that gets no requests, and where no other one does, also
        where the others are lost before it has left: it stays, and gets requests again."""
        indices = [index for index in self._serving_indices if self._replicas[index].mesh.role == role]
        if not indices:
            raise RuntimeError(f"{role}: gets no requests, it leaves or is lost; look at `torchtitan-rl view`")
        (index,) = indices
        if len(self._serving_indices) == 1:
            raise RuntimeError(f"{role}: is the only healthy replica; it stays")
        replica = self._replicas[index]
        replica.membership = Membership.LEAVING
        self._update_serving()
        hurried = None if hurry is None else asyncio.ensure_future(hurry.wait())
        if hurried is not None:
            hurried.add_done_callback(lambda _: self._progress.set())
        try:
            while replica.lost is None:
                num_unanswered, leaves_now = self._router.loads[index], hurry is not None and hurry.is_set()
                if index in self._serving_indices and not leaves_now:
                    raise RuntimeError(f"{role}: is the only healthy replica by now; it stays")
                if not num_unanswered:
                    break
                if leaves_now:
                    logger.warning("%s: leaves now; other replicas answer its last %d requests", role, num_unanswered)
                    replica.lost = "has left before it had answered"
                    self._start(self._abandon(replica))
                    break
                self._progress.clear()
                await self._progress.wait()
            replica.membership = Membership.LEFT
        finally:
            if replica.membership is Membership.LEAVING:  # it stays, or this call is given up
                replica.membership = Membership.MEMBER
            self._update_serving()
            if hurried is not None:
                hurried.cancel()
        if replica.lost is None:
            replica.lost = "has left"
            await replica.release()

    # Replicas that are lost, and their replacement.

    async def _some_serving(self) -> list[int]:
        """`_require_serving()`, once a replica has come where all are lost and one is expected."""
        while self._expects_replica():
            self._replica_arrived.clear()
            with span("wait for a replacement"):
                await self._replica_arrived.wait()
        return self._require_serving()

    def _expects_replica(self) -> bool:
        """Whether no replica is left, and one is being replaced or is to join."""
        return not (self._serving_indices or self._no_repair) and self._num_to_come() > 0

    def _num_to_come(self) -> int:
        """The replicas that are being replaced, and the blocks of `starting` under way."""
        return self._num_starting + sum(replica.is_being_replaced for replica in self._replicas)

    def _send_waiting(self) -> None:
        """Sends what waits for a replica, or fails it where none is expected any more."""
        self._replica_arrived.set()
        waiting, self._waiting = self._waiting, []
        for batch, version in waiting:
            self._dispatch(batch, version)

    def _require_serving(self) -> list[int]:
        """`_serving_indices`, the list itself. Raises RuntimeError where it is empty, and when lost replicas are not
        replaced any more."""
        if self._no_repair or not self._serving_indices:
            raise RuntimeError(self._no_repair or self._all_lost())
        return self._serving_indices

    def _all_lost(self) -> str:
        reasons = "; ".join(f"{role}: {reason}" for role, reason in self.health().items())
        return f"no generator replica is left ({reasons}); look at their logs and start the run again"

    def _begin_probing(self, repair: Repair) -> None:
        """Begins to ask every replica for signs of life."""
        self._is_probing = True
        for index in range(len(self._replicas)):
            self._start(repair.probe(partial(self._current, index), self._lose))

    def _update_serving(self) -> None:
        """Chooses the replicas that get requests: the healthy ones that do not leave. Where none stays and none is
        expected, those that leave do. Wakes `leave`, whose replica may have to stay."""
        healthy = [(index, replica) for index, replica in enumerate(self._replicas) if replica.lost is None]
        staying = [index for index, replica in healthy if replica.membership is Membership.MEMBER]
        leaving = [index for index, replica in healthy if replica.membership is Membership.LEAVING]
        self._serving_indices = staying if staying or self._num_to_come() else leaving
        self._progress.set()

    def _current(self, index: int) -> Replica:
        return self._replicas[index]

    def _lose(self, replica: Replica, error: ReplicaLost) -> None:
        """Takes a replica out of use, keeps the first reason, and replaces the replica or ends its processes."""
        if replica.lost is not None or self._closed:  # once closed, meshes are being stopped
            return
        replica.lost = str(error)
        index = self._replicas.index(replica)
        repair = None if replica.membership is Membership.LEAVING else self._repair
        replica.is_being_replaced = repair is not None
        self._update_serving()
        event = {"event": "replica_lost", "who": replica.mesh.role}
        logger.warning("a generator replica is lost, %d left: %s", len(self._serving_indices), error, extra=event)
        self._start(self._abandon(replica) if repair is None else self._replace(index, repair))

    async def _abandon(self, replica: Replica) -> None:
        # Together: a load that hangs holds the release up until the processes end.
        await asyncio.gather(release_versions(replica), end_processes(replica.mesh))

    async def _replace(self, index: int, repair: Repair) -> None:
        """Puts a replacement in the place of a lost replica, or notes why there is none. One whose host has left the
        run has left with it."""
        lost = self._replicas[index]
        try:
            self._start(release_versions(lost))  # not awaited: a load that hangs holds it up until the processes end
            self._replicas[index] = await repair.replacement(lost, partial(self._new_replica, index))
        except TooManyRestarts as error:
            self._no_repair = str(error)
        except PlaceGone as error:
            lost.membership = Membership.LEFT
            role = lost.mesh.role
            logger.warning("%s has left: %s", role, error, extra={"event": "replica_left", "who": role})
        except Exception as error:
            self._no_repair = f"{lost.mesh.role} was not replaced: {describe(error)}"
            logger.exception("%s: is not replaced", lost.mesh.role)
        finally:
            lost.is_being_replaced = False
            self._update_serving()
            self._send_waiting()


def _as_recorded(routes: RecordedRoutes, batch: _Batch) -> dict[int, _Batch]:
    """Index of a replica -> its share of the requests. A request that a lost engine left unanswered goes there too, as
    company for those that it answered, and its answer there is nobody's."""
    shares: dict[int, _Batch] = defaultdict(list)
    for request, future in batch:
        *lost, answering = routes.route(request)
        for index in lost:
            nobodys = asyncio.get_running_loop().create_future()
            nobodys.add_done_callback(lambda done: done.cancelled() or done.exception())  # read: asyncio would warn
            shares[index].append((request, nobodys))
        shares[answering].append((request, future))
    return shares


def _pinned(version: int | None) -> int | None:
    """The version for which a router looks for a replica; None: any replica does, as for the base, which all hold."""
    return None if version == WITHOUT_ADAPTERS else version


def _fail_cancelled(batch: _Batch, sending: asyncio.Future) -> None:
    """For a task that was cancelled before its first step: it never came to fail its requests."""
    if sending.cancelled():
        _fail(batch, RuntimeError(_CLOSED))


def _fail(batch: _Batch, error: BaseException) -> None:
    """The error as the answer to every request that has none."""
    for _, future in batch:
        if not future.done():
            future.set_exception(error)

"""What a step asks of the generators: completions, and the weights of a version. Replicas that fail are reported to
`SamplingClient`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

from torchtitan_rl.actors.operations import GeneratorOperations, Operation
from torchtitan_rl.dispatch.one_version import OneVersion
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.repair import Repair
from torchtitan_rl.dispatch.replica import Replica, ReplicaLost
from torchtitan_rl.dispatch.role_mesh import RoleMesh
from torchtitan_rl.dispatch.timed_router import TimedRouter
from torchtitan_rl.dispatch.version_holders import VersionHolders
from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.types import Completion, Request, SamplingParams
from torchtitan_rl.types.refusals import refuse_prompt

__all__ = ["SamplingSteps"]


class SamplingSteps(ABC):
    """`sample` and `pull` over all replicas. `SamplingClient` adds scoring, routing, and what follows a loss."""

    def __init__(
        self,
        replicas: list[RoleMesh],
        versions: VersionHolders | OneVersion,
        *,
        max_model_len: int,
        timeout_s: float,
        verify: bool = True,
        placement: Placement | None = None,
        repair: Repair | None = None,
    ):
        """`placement` gives generators their turns on shared devices; None: no role shares devices. `repair` replaces
        lost replicas; None: they stay lost."""
        self._versions, self._placement = versions, placement
        self._router = router = TimedRouter(len(replicas)) if len(replicas) > 1 else None
        self._replica = lambda mesh, index: Replica(
            mesh, versions, verify, None if router is None else partial(router.loaded, index)
        )
        self._replicas = [self._replica(mesh, index) for index, mesh in enumerate(replicas)]
        self._left = list(range(len(replicas)))  # the replicas that are not lost, by index
        self._repair, self._broken = repair, ""
        """`_broken`: why no replica is replaced any more; empty while replacements are possible."""
        self._repairing: set[int] = set()
        self._repaired = asyncio.Event()
        self._waiting: list[tuple[list, int | None]] = []
        """Requests that wait for a replacement, with the version they are pinned to."""
        self._probed = False
        self._max_model_len, self._timeout_s = max_model_len, timeout_s
        self._pending: dict[int | None, list[tuple[Request, asyncio.Future]]] = defaultdict(list)
        self._tasks: set[asyncio.Task] = set()

    @property
    def policy_version(self) -> int | None:
        """The version that serves unpinned requests; None before the first pull."""
        return self._versions.served

    def health(self) -> dict[str, str]:
        """Role of each replica -> `"healthy"`, or why the replica is out of use, known once a call has failed."""
        return {replica.mesh.role: replica.lost or "healthy" for replica in self._replicas}

    async def pull(self, version: int) -> None:
        """Every healthy replica loads a published version. Raises RuntimeError when no replica is left."""
        if self._repair is not None and not self._probed:
            self._probe(self._repair)
        async with self._turn(GeneratorOperations.load):
            self._versions.served = version
            await self._on_all(lambda replica: replica.pull(version))

    async def pull_newest(self) -> int:
        """Every healthy replica loads what the trainer holds now, as a version of its own. Returns the version."""
        version = await self._versions.publish()
        await self.pull(version)
        return version

    async def _on_all(self, call: Callable[[Replica], Coroutine]) -> None:
        indices = await self._some_healthy()
        results = await asyncio.gather(*(call(self._replicas[i]) for i in indices), return_exceptions=True)
        for index, result in zip(indices, results):
            if isinstance(result, ReplicaLost):
                self._lose(self._replicas[index], result)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ReplicaLost):
                raise result
        await self._some_healthy()

    async def _some_healthy(self) -> list[int]:
        """`_healthy()`, after the end of repairs if all replicas are being replaced."""
        while self._repairing and not self._left:
            self._repaired.clear()
            with span("wait for a replacement"):
                await self._repaired.wait()
        return self._healthy()

    def _healthy(self) -> list[int]:
        """Indices of the replicas that are not lost; the same list while none is lost or replaced. Raises RuntimeError
        when all are lost, and when lost replicas are not replaced any more."""
        if self._broken or not self._left:
            raise RuntimeError(self._broken or self._all_lost())
        return self._left

    def _all_lost(self) -> str:
        reasons = "; ".join(f"{role}: {reason}" for role, reason in self.health().items())
        return f"no generator replica is left ({reasons}); look at their logs and start the run again"

    def _turn(self, operation: Operation) -> AbstractAsyncContextManager:
        """The generators' turn on the devices for as long as the block runs; no wait where no role shares devices."""
        return nullcontext() if self._placement is None else self._placement.turn("generator", operation)

    async def sample(
        self, tokens: list[int], params: SamplingParams, *, policy_version: int | None = None
    ) -> Completion:
        """One completion. Raises ValueError for an empty prompt, and when prompt and completion exceed the context."""
        if not tokens or len(tokens) + params.max_tokens > self._max_model_len:
            refuse_prompt(len(tokens), params.max_tokens, self._max_model_len)
        completion = await self._submit(Request(list(tokens), params), policy_version)
        completion.filtered = ", ".join(f"{name}={value}" for name, value in params.altered().items())
        return completion

    async def _submit(self, request: Request, version: int | None):
        if self.policy_version is None:
            raise RuntimeError("policy_version=None: the generators hold no weights yet; publish and pull first")
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if not self._pending[version]:
            # Two iterations of the event loop: requests of asyncio tasks that started in this iteration travel too.
            loop.call_soon(loop.call_soon, self._flush, version)
        self._pending[version].append((request, future))
        return await future

    def _flush(self, version: int | None) -> None:
        self._dispatch(self._pending.pop(version), version)

    def _dispatch(self, batch: list, version: int | None) -> None:
        """Sends each request to the replica that the router chooses. Without a router there is one replica."""
        try:
            healthy = self._healthy()
        except RuntimeError as error:
            return self._none_left(batch, version, error)
        shares = {healthy[0]: batch} if self._router is None else self._routed(batch, version, healthy)
        for index, share in shares.items():
            self._start(running("hand requests and answers over", self._send(index, share, version)))

    async def _send(self, index: int, batch: list, version: int | None) -> None:
        replica, requests, unanswered = self._replicas[index], [request for request, _ in batch], len(batch)
        try:
            async with self._turn(GeneratorOperations.sample):
                async for answers in replica.sample(requests, version, self._timeout_s):
                    for position, answer in answers:
                        future = batch[position][1]
                        if not future.done():
                            (future.set_exception if isinstance(answer, ValueError) else future.set_result)(answer)
                    unanswered -= len(answers)
                    if self._router is not None:
                        self._router.finished(index, len(answers), version)
        except BaseException as error:
            self._interrupted(replica, index, batch, version, unanswered, error)

    def _start(self, work: Coroutine) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @abstractmethod
    def _none_left(self, batch: list, version: int | None, error: RuntimeError) -> None:
        """Keeps requests until a lost replica is replaced, or fails them where none will be."""

    @abstractmethod
    def _interrupted(
        self, replica: Replica, index: int, batch: list, version: int | None, unanswered: int, error: BaseException
    ) -> None:
        """Sends the requests of a lost replica to others, and fails them for any other error."""

    @abstractmethod
    def _routed(self, batch: list, version: int | None, healthy: list[int]) -> dict[int, list]:
        """Index of a replica -> its share of the requests."""

    @abstractmethod
    def _lose(self, replica: Replica, error: ReplicaLost) -> None:
        """Takes a replica out of use, keeps the first reason, and replaces the replica or ends its processes."""

    @abstractmethod
    def _probe(self, repair: Repair) -> None:
        """Begins to ask every replica for signs of life."""

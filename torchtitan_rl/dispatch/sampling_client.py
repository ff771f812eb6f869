"""Sampling and scoring with any policy version, over replicas of the generator."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial

import torch

from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.repair import Repair, TooManyRestarts
from torchtitan_rl.dispatch.replica import Replica, ReplicaLost
from torchtitan_rl.dispatch.role_mesh import RoleMesh
from torchtitan_rl.dispatch.router import Router
from torchtitan_rl.dispatch.versions import OneVersion, PolicyVersions
from torchtitan_rl.types import Completion, Request, SamplingParams

__all__ = ["SamplingClient"]

logger = logging.getLogger(__name__)


class SamplingClient:
    """`sample`, `score` and `score_top` over all replicas.

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
        versions: PolicyVersions | OneVersion,
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
        self._router = router = Router(len(replicas)) if len(replicas) > 1 else None
        self._replica = lambda mesh, index: Replica(
            mesh, versions, verify, None if router is None else partial(router.loaded, index)
        )
        self._replicas = [self._replica(mesh, index) for index, mesh in enumerate(replicas)]
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
        """Role of each replica -> `"healthy"`, or why the replica is out of use. A death shows once a call to the
        replica has failed."""
        return {replica.mesh.role: replica.lost or "healthy" for replica in self._replicas}

    @property
    def num_restarts(self) -> int:
        """Replicas that were replaced so far."""
        return 0 if self._repair is None else self._repair.num_restarts

    async def pull(self, version: int) -> None:
        """Every healthy replica loads a published version and drops its caches. Raises RuntimeError when no replica is
        left."""
        if self._repair is not None and not self._probed:
            self._probed = True
            for index in range(len(self._replicas)):
                self._start(self._repair.probe(partial(self._current, index), self._lose))
        async with self._turn("pull"):
            self._versions.served = version
            await self._on_all(lambda replica: replica.pull(version))

    async def load_hf(self, directory: str, *, version: int = 0) -> None:
        """Every healthy replica loads the weights of a Hugging Face directory and calls them `version`. No trainer is
        needed. Raises RuntimeError when no replica is left."""
        self._versions.served = version
        await self._on_all(lambda replica: replica.load_hf(directory, version))

    async def _on_all(self, call: Callable[[Replica], Coroutine]) -> None:
        indices = await self._some_healthy()
        results = await asyncio.gather(*(call(self._replicas[i]) for i in indices), return_exceptions=True)
        for index, result in zip(indices, results, strict=True):
            if isinstance(result, ReplicaLost):
                self._lose(self._replicas[index], result)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ReplicaLost):
                raise result
        await self._some_healthy()

    async def _some_healthy(self) -> list[int]:
        """The same as `_healthy`, after the end of repairs if all replicas are being replaced."""
        while self._repairing and all(replica.lost is not None for replica in self._replicas):
            self._repaired.clear()
            await self._repaired.wait()
        return self._healthy()

    def _healthy(self) -> list[int]:
        """Indices of the replicas that are not lost. Raises RuntimeError, naming every replica, when all are lost, and
        when lost replicas are not replaced any more."""
        if self._broken:
            raise RuntimeError(self._broken)
        left = [index for index, replica in enumerate(self._replicas) if replica.lost is None]
        if not left:
            reasons = "; ".join(f"{role}: {reason}" for role, reason in self.health().items())
            raise RuntimeError(f"no generator replica is left ({reasons}); look at their logs and start the run again")
        return left

    def _turn(self, operation: str) -> AbstractAsyncContextManager:
        """The generators' turn on the devices for as long as the block runs; no wait where no role shares devices."""
        return nullcontext() if self._placement is None else self._placement.turn("generator", operation)

    def _current(self, index: int) -> Replica:
        return self._replicas[index]

    def close(self) -> None:
        """Cancels every unanswered call. Its caller gets a RuntimeError."""
        for task in self._tasks:
            task.cancel()
        for batch, _ in self._waiting:
            _fail(batch, RuntimeError("sampling: the client was closed before the generators answered"))
        self._waiting.clear()

    async def sample(
        self, tokens: list[int], params: SamplingParams, *, policy_version: int | None = None
    ) -> Completion:
        """One completion. Raises ValueError for an empty prompt, and when prompt and completion exceed the context."""
        if len(tokens) + params.max_tokens > self._max_model_len:
            raise ValueError(
                f"prompt of {len(tokens)} tokens + max_tokens={params.max_tokens}: exceed "
                f"generator.max_model_len={self._max_model_len}; shorten one or raise the other"
            )
        if not tokens:
            raise ValueError("prompt=[]: has no tokens; give at least one")
        completion = await self._submit(Request(list(tokens), params), policy_version)
        completion.filtered = params.top_k > 0 or params.top_p < 1.0
        return completion

    async def score(self, tokens: list[int], *, policy_version: int | None = None) -> list[float]:
        """Log-probability of every token but the first, at temperature 1. Raises ValueError for fewer than 2 tokens, or
        for as many as the context or more."""
        return await self._score(Request(list(tokens), None), policy_version)

    async def score_top(
        self, tokens: list[int], top_k: int, *, policy_version: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `top_k` likeliest tokens at the position of each of T tokens but the first, best first: token ids, int64
        (T - 1, top_k), and log-probabilities at temperature 1, float32 (T - 1, top_k). Raises ValueError for a `top_k`
        below 1 or beyond the vocabulary, and as `score` does."""
        if top_k < 1:
            raise ValueError(f"top_k={top_k}: must be at least 1; use score for the tokens that are there")
        return await self._score(Request(list(tokens), None, top_k), policy_version)

    async def _score(self, request: Request, version: int | None):
        if not 2 <= len(request.tokens) < self._max_model_len:
            raise ValueError(
                f"tokens of length {len(request.tokens)}: scoring needs at least 2 and fewer than "
                f"generator.max_model_len={self._max_model_len}"
            )
        return await self._submit(request, version)

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
            if self._repairing and not self._broken:
                self._waiting.append((batch, version))
            else:
                _fail(batch, error)
            return
        shares = {healthy[0]: batch} if self._router is None else self._routed(batch, version, healthy)
        for index, share in shares.items():
            self._start(self._send(index, share, version))

    def _routed(self, batch: list, version: int | None, healthy: list[int]) -> dict[int, list]:
        indices = self._router.route(
            [request.tokens for request, _ in batch],
            version,
            healthy=healthy,
            held=[replica.held for replica in self._replicas],
            newest=self.policy_version,
        )
        shares: dict[int, list] = defaultdict(list)
        for index, call in zip(indices, batch, strict=True):
            shares[index].append(call)
        return shares

    async def _send(self, index: int, batch: list, version: int | None) -> None:
        replica, lost = self._replicas[index], False
        try:
            async with self._turn("sample"):
                answers = await replica.sample([request for request, _ in batch], version, self._timeout_s)
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    (future.set_exception if isinstance(answer, ValueError) else future.set_result)(answer)
        except ReplicaLost as error:
            lost = True
            self._lose(replica, error)
        except asyncio.CancelledError:
            _fail(batch, RuntimeError("sampling: the client was closed before the generators answered"))
            raise
        except Exception as error:
            _fail(batch, error)
        finally:
            if self._router is not None:
                self._router.finished(index, len(batch), version)
        if lost:
            self._dispatch([call for call in batch if not call[1].done()], version)

    def _lose(self, replica: Replica, error: ReplicaLost) -> None:
        """Takes a replica out of use, keeps the first reason, and replaces the replica or ends its processes."""
        if replica.lost is not None:
            return
        replica.lost = str(error)
        left = list(self.health().values()).count("healthy")
        logger.warning("a generator replica is lost, %d left: %s", left, error)
        if self._repair is None:
            self._start(self._abandon(replica))
        else:
            self._repairing.add(index := self._replicas.index(replica))
            self._start(self._replace(index, self._repair))

    async def _abandon(self, replica: Replica) -> None:
        await replica.release()
        await replica.end()

    async def _replace(self, index: int, repair: Repair) -> None:
        """Puts a replacement in the place of a lost replica, or notes why there is none."""
        lost = self._replicas[index]
        try:
            await lost.release()
            self._replicas[index] = await repair.replacement(lost, lambda mesh: self._replica(mesh, index))
        except TooManyRestarts as error:
            self._broken = str(error)
        finally:
            self._repairing.discard(index)
            self._repaired.set()
            waiting, self._waiting = self._waiting, []
            for batch, version in waiting:
                self._dispatch(batch, version)

    def _start(self, work: Coroutine) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fail(batch: list, error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)

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
from torchtitan_rl.dispatch.replica import Replica, ReplicaLost
from torchtitan_rl.dispatch.role_mesh import RoleMesh
from torchtitan_rl.dispatch.router import Router
from torchtitan_rl.dispatch.versions import OneVersion, PolicyVersions
from torchtitan_rl.types import Completion, Request, SamplingParams

__all__ = ["SamplingClient"]

logger = logging.getLogger(__name__)


class SamplingClient:
    """`sample`, `score` and `score_top` over all replicas.

    Requests made before the event loop comes round again travel together and are admitted in the order they
    were made, before the engine's next iteration: the same requests give the same tokens. With several replicas a
    `Router` says which gets which. Requests of a replica that is lost (its process or engine died, or a call passed its
    deadline) are sent to the others, so each goes to a replica at most once; with a seed it gives the same tokens there
    (on a GPU, where sums depend on what else is in the batch, nearly the same log-probabilities and so not always the
    same tokens).
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
    ):
        """`placement` says which roles share devices with the generators; None: none."""
        self._versions, self._placement = versions, placement
        self._router = router = Router(len(replicas)) if len(replicas) > 1 else None
        self._replicas = [
            Replica(mesh, versions, verify, None if router is None else partial(router.loaded, index))
            for index, mesh in enumerate(replicas)
        ]
        self._max_model_len, self._timeout_s = max_model_len, timeout_s
        self._pending: dict[int | None, list[tuple[Request, asyncio.Future]]] = defaultdict(list)
        self._tasks: set[asyncio.Task] = set()

    @property
    def policy_version(self) -> int | None:
        """The version that requests without one are served by; None before the first pull."""
        return self._versions.served

    def health(self) -> dict[str, str]:
        """Role of each replica -> `"healthy"` or why it is out of use. A death is noticed when a call meets it."""
        return {replica.mesh.role: replica.lost or "healthy" for replica in self._replicas}

    async def pull(self, version: int) -> None:
        """Every healthy replica loads a published version and drops its caches. Raises RuntimeError if none is left."""
        async with self._turn("pull"):
            self._versions.served = version
            await self._on_all(lambda replica: replica.pull(version))

    async def load_hf(self, directory: str, *, version: int = 0) -> None:
        """Every healthy replica loads a Hugging Face directory; no trainer needed."""
        self._versions.served = version
        await self._on_all(lambda replica: replica.load_hf(directory, version))

    async def _on_all(self, call: Callable[[Replica], Coroutine]) -> None:
        indices = self._healthy()
        results = await asyncio.gather(*(call(self._replicas[i]) for i in indices), return_exceptions=True)
        for index, result in zip(indices, results, strict=True):
            if isinstance(result, ReplicaLost):
                self._lose(self._replicas[index], result)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ReplicaLost):
                raise result
        self._healthy()  # raises when none is left

    def _healthy(self) -> list[int]:
        """Replicas that are not lost. Raises RuntimeError that names every replica when none is left."""
        left = [index for index, replica in enumerate(self._replicas) if replica.lost is None]
        if not left:
            reasons = "; ".join(f"{role}: {reason}" for role, reason in self.health().items())
            raise RuntimeError(f"no generator replica is left ({reasons}); look at their logs and start the run again")
        return left

    def _turn(self, operation: str) -> AbstractAsyncContextManager:
        """The devices, for as long as the block runs; at once where generators share them with nobody."""
        return nullcontext() if self._placement is None else self._placement.turn("generator", operation)

    def close(self) -> None:
        """Gives up on every call that has not been answered."""
        for task in self._tasks:
            task.cancel()

    async def sample(
        self, tokens: list[int], params: SamplingParams, *, policy_version: int | None = None
    ) -> Completion:
        """One completion. Raises ValueError when prompt and completion do not fit the context."""
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
        """Log-probability of every token but the first, at temperature 1."""
        return await self._score(Request(list(tokens), None), policy_version)

    async def score_top(
        self, tokens: list[int], top_k: int, *, policy_version: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For each of T tokens but the first, the `top_k` likeliest tokens in its place, int64 (T - 1, top_k), and
        their log-probabilities at temperature 1, float32 of the same shape, best first. Raises ValueError for a `top_k`
        beyond the vocabulary."""
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
            # Two rounds: tasks that tasks of this round have just started still get in.
            loop.call_soon(loop.call_soon, self._flush, version)
        self._pending[version].append((request, future))
        return await future

    def _flush(self, version: int | None) -> None:
        self._dispatch(self._pending.pop(version), version)

    def _dispatch(self, batch: list, version: int | None) -> None:
        """Sends every request to the one replica, or to the one that the router chooses."""
        try:
            healthy = self._healthy()
        except RuntimeError as error:
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
        """Takes a replica out of use; the first reason is kept. Whoever wants a new one in its place would start it
        here."""
        if replica.lost is not None:
            return
        replica.lost = str(error)
        left = list(self.health().values()).count("healthy")
        logger.warning("a generator replica is lost, %d left: %s", left, error)
        self._start(replica.abandon())

    def _start(self, work: Coroutine) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fail(batch: list, error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)

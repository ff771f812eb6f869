"""Sampling and scoring with any policy version, over replicas of the generator."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from functools import partial

import torch

from torchtitan_rl.actors.operations import GeneratorOperations
from torchtitan_rl.dispatch.repair import Repair, TooManyRestarts, end
from torchtitan_rl.dispatch.replica import Replica, ReplicaLost
from torchtitan_rl.dispatch.sampling_steps import SamplingSteps
from torchtitan_rl.types import Request, Scores

__all__ = ["SamplingClient"]

logger = logging.getLogger(__name__)

_CLOSED = "sampling: the client was closed before the generators answered"


class SamplingClient(SamplingSteps):
    """`sample`, `score` and `score_top` over all replicas.

    Requests made in one iteration of the event loop travel together. The engine admits them in the order they were
    made, before its next iteration: the same requests give the same tokens. With several replicas a `Router` chooses a
    replica for each request.

    A replica is lost when its process or engine dies or a call passes its deadline. Its unanswered requests go to the
    healthy replicas; no replica gets a request twice. A request with a seed gets the same tokens from any replica on a
    CPU. On a GPU sums depend on the other sequences in the batch: log-probabilities are nearly equal, and tokens not
    always the same.
    """

    @property
    def num_restarts(self) -> int:
        """Replicas that were replaced so far."""
        return 0 if self._repair is None else self._repair.num_restarts

    def in_flight(self) -> list[int]:
        """The unanswered requests of each replica; a lost one has none."""
        return [replica.unanswered * (replica.lost is None) for replica in self._replicas]

    def stalls(self) -> list[float]:
        """Per replica, the seconds for which its engine stood still at its last load of weights."""
        return [replica.stall_s for replica in self._replicas]

    async def profile(self, role: str, rank: int, file: str) -> None:
        """Begins to profile a rank of the replica `role`; with `file`, ends and writes the trace there."""
        replica = next(replica for replica in self._replicas if replica.mesh.role == role)
        await replica.mesh.call_rank(rank, GeneratorOperations.profile, file)

    def request_times(self) -> dict[str, tuple[float, int]]:
        """Role of each replica -> `TimedRouter.times`; {} with one replica."""
        if self._router is None:
            return {}
        return {replica.mesh.role: times for replica, times in zip(self._replicas, self._router.times(), strict=True)}

    def held(self) -> int | None:
        """The version that every healthy replica holds, also while a newer one is fetched; None where they differ."""
        versions = {replica.held for replica in self._replicas if replica.lost is None}
        return versions.pop() if len(versions) == 1 else None

    async def weights(self) -> dict[str, torch.Tensor]:
        """The parameters that the first healthy replica holds, by torchtitan's names (rank 0's part of each); for small
        models."""
        return (await self._replicas[self._healthy()[0]].mesh.call_each(GeneratorOperations.weights))[0]

    async def load_hf(self, directory: str, *, version: int = 0) -> None:
        """Every healthy replica loads the weights of a Hugging Face directory and calls them `version`. No trainer is
        needed. Raises RuntimeError when no replica is left."""
        self._versions.served = version
        await self._on_all(lambda replica: replica.load_hf(directory, version))

    async def score(self, tokens: list[int], *, policy_version: int | None = None, cached: bool = False) -> Scores:
        """Log-probability of every token but the first, at temperature 1. No prefix cache is read unless `cached`; the
        tokens that the cache covers are NaN then. Raises ValueError for fewer than 2 tokens, or for as many as the
        context or more."""
        return await self._score(Request(list(tokens), None, cached=cached), policy_version)

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

    def close(self) -> None:
        """Cancels every unanswered call. Its caller gets a RuntimeError."""
        for task in self._tasks:
            task.cancel()
        for batch, _ in self._waiting:
            _fail(batch, RuntimeError(_CLOSED))
        self._waiting.clear()

    def _routed(self, batch: list, version: int | None, healthy: list[int]) -> dict[int, list]:
        indices = self._router.route(
            [request.tokens for request, _ in batch],
            version,
            healthy=healthy,
            held=() if version is None else [replica.held for replica in self._replicas],
            newest=self.policy_version,
        )
        shares: dict[int, list] = defaultdict(list)
        for index, call in zip(indices, batch, strict=True):
            shares[index].append(call)
        return shares

    def _none_left(self, batch: list, version: int | None, error: RuntimeError) -> None:
        if self._repairing and not self._broken:
            self._waiting.append((batch, version))
        else:
            _fail(batch, error)

    def _interrupted(
        self, replica: Replica, index: int, batch: list, version: int | None, unanswered: int, error: BaseException
    ) -> None:
        if isinstance(error, ReplicaLost):
            self._lose(replica, error)
        elif isinstance(error, asyncio.CancelledError):
            _fail(batch, RuntimeError(_CLOSED))
        elif isinstance(error, Exception):
            _fail(batch, error)
        if self._router is not None:
            self._router.finished(index, unanswered, version)
        if isinstance(error, ReplicaLost):
            self._dispatch([call for call in batch if not call[1].done()], version)
        elif not isinstance(error, Exception):
            raise error

    def _probe(self, repair: Repair) -> None:
        self._probed = True
        for index in range(len(self._replicas)):
            self._start(repair.probe(partial(self._current, index), self._lose))

    def _not_lost(self) -> list[int]:
        return [index for index, replica in enumerate(self._replicas) if replica.lost is None]

    def _current(self, index: int) -> Replica:
        return self._replicas[index]

    def _lose(self, replica: Replica, error: ReplicaLost) -> None:
        if replica.lost is not None:
            return
        replica.lost = str(error)
        self._left = self._not_lost()
        told = {"event": "replica_lost", "who": replica.mesh.role}
        logger.warning("a generator replica is lost, %d left: %s", len(self._left), error, extra=told)
        if self._repair is None:
            self._start(self._abandon(replica))
        else:
            self._repairing.add(index := self._replicas.index(replica))
            self._start(self._replace(index, self._repair))

    async def _abandon(self, replica: Replica) -> None:
        await replica.release()
        await end(replica.mesh)

    async def _replace(self, index: int, repair: Repair) -> None:
        """Puts a replacement in the place of a lost replica, or notes why there is none."""
        lost = self._replicas[index]
        try:
            await lost.release()
            self._replicas[index] = await repair.replacement(lost, lambda mesh: self._replica(mesh, index))
            self._left = self._not_lost()
        except TooManyRestarts as error:
            self._broken = str(error)
        finally:
            self._repairing.discard(index)
            self._repaired.set()
            waiting, self._waiting = self._waiting, []
            for batch, version in waiting:
                self._dispatch(batch, version)


def _fail(batch: list, error: BaseException) -> None:
    """The error as the answer to every request that has none."""
    for _, future in batch:
        if not future.done():
            future.set_exception(error)

"""Sampling and scoring with any policy version, over replicas of the generator."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial

import torch

from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.role_mesh import RoleMesh, WorkerLost
from torchtitan_rl.dispatch.router import Router
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.types import Completion, Request, SamplingParams

__all__ = ["SamplingClient"]

logger = logging.getLogger(__name__)


_END_WITHIN_S = 90.0  # Monarch may need a minute to notice


class _ReplicaLost(Exception):
    """The replica itself is at fault, whatever it was asked. The message is the reason."""


class _Replica:
    """One engine and which version it serves.

    A request that names a version has the engine to itself and others of that version until it is done; a
    request that does not is served by the newest, and a pull may change weights under it (its
    `policy_versions` then say so).
    """

    def __init__(self, mesh: RoleMesh, versions: PolicyVersions | None, verify: bool, on_load: Callable[[], None]):
        self.mesh, self.versions, self.verify, self.on_load = mesh, versions, verify, on_load
        self.held: int | None = None
        self.newest: int | None = None
        self._lost: str | None = None
        self._naming, self._free = 0, 0
        self._changed = asyncio.Condition()

    async def sample(self, requests: list[Request], version: int | None, timeout_s: float) -> list:
        """Answers in order, a ValueError where a request is at fault. Raises _ReplicaLost."""
        async with self._serving(version):
            try:
                return await self.mesh.call_leader("sample", requests, timeout_s=timeout_s)
            except RuntimeError as error:  # a request's own fault comes as an answer: this is the engine's
                raise _ReplicaLost(str(error)) from error

    async def pull(self, version: int) -> None:
        """Loads a version of the store. Raises _ReplicaLost."""
        async with self._changed:
            await self._until(lambda: self._naming == 0)
            self.newest = version
            await self._load(version)  # even a version it holds: it may have been published again

    async def load_hf(self, directory: str, version: int) -> None:
        """Loads the weights of a Hugging Face directory. Raises _ReplicaLost."""
        async with self._changed:
            await self._until(lambda: self._naming == 0)
            self.newest = version
            await self._fetch("fetch_hf", directory, version)
            await self._activate(version)
            self.held = version

    async def abandon(self, reason: str) -> None:
        """Lets go of the version it holds and of everyone who waits for it, and ends what is left of its processes."""
        self._lost = reason
        async with self._changed:
            self._changed.notify_all()
            held, self.held = self.held, None
            if self.versions is not None and held is not None:
                await self.versions.release(held, self.mesh.role)
        await asyncio.gather(*(self._end(rank) for rank in range(self.mesh.num_ranks)))

    async def _end(self, rank: int) -> None:
        try:
            await asyncio.wait_for(self.mesh.call_rank(rank, "abort"), _END_WITHIN_S)
        except TimeoutError:
            logger.warning("%s-%d does not end; it keeps its memory until the run ends", self.mesh.role, rank)
        except WorkerLost:
            pass  # as it should be

    @asynccontextmanager
    async def _serving(self, version: int | None):
        async with self._changed:
            if version is None:
                await self._until(lambda: self.held == self.newest or self._naming == 0)
                if self.held != self.newest:
                    await self._load(self.newest)
                self._free += 1
            else:
                await self._until(lambda: self.held == version or (self._naming == 0 and self._free == 0))
                if self.held != version:
                    await self._load(version)
                self._naming += 1
        try:
            yield
        finally:
            async with self._changed:
                if version is None:
                    self._free -= 1
                else:
                    self._naming -= 1
                self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._changed.wait_for(lambda: self._lost is not None or condition())
        if self._lost is not None:
            raise _ReplicaLost(self._lost)

    async def _load(self, version: int) -> None:
        if self.versions is not None:
            self.versions.pin(version, self.mesh.role)
        try:
            await self._fetch("fetch", version, self.verify)
            await self._activate(version)
        except BaseException:
            if self.versions is not None:
                await self.versions.release(version, self.mesh.role)
            raise
        previous, self.held = self.held, version
        if self.versions is not None and previous is not None:
            await self.versions.release(previous, self.mesh.role)

    async def _fetch(self, endpoint: str, *args) -> None:
        try:
            await self.mesh.call_all(endpoint, *args)
        except WorkerLost as error:  # only this: weights that are damaged or do not fit would be so anywhere
            raise _ReplicaLost(str(error)) from error

    async def _activate(self, version: int) -> None:
        try:
            await self.mesh.call_leader("load", version)
        except RuntimeError as error:
            raise _ReplicaLost(str(error)) from error
        self.on_load()
        self._changed.notify_all()  # they look once the lock is free


class SamplingClient:
    """`sample`, `score` and `score_top` over all replicas.

    Requests made before the event loop comes round again travel together and are admitted in the order they
    were made, before the engine's next iteration: the same requests give the same tokens. `Router` says which replica
    gets which. Requests of a replica that is lost (its process or engine died, or a call passed its deadline) are sent
    to the others, so each goes to a replica at most once; with a seed it gives the same tokens there (on a GPU, where
    sums depend on what else is in the batch, nearly the same log-probabilities and so not always the same tokens).
    """

    def __init__(
        self,
        replicas: list[RoleMesh],
        versions: PolicyVersions | None,
        *,
        max_model_len: int,
        timeout_s: float,
        verify: bool = True,
        placement: Placement | None = None,
    ):
        self._placement = placement or Placement()
        self._router = router = Router([mesh.role for mesh in replicas])
        self._replicas = [
            _Replica(mesh, versions, verify, partial(router.loaded, index)) for index, mesh in enumerate(replicas)
        ]
        self._max_model_len, self._timeout_s = max_model_len, timeout_s
        self._pending: dict[int | None, list[tuple[Request, asyncio.Future]]] = defaultdict(list)
        self._tasks: set[asyncio.Task] = set()
        self.policy_version: int | None = None
        """The version that requests without one are served by; None before the first pull."""

    def health(self) -> dict[str, str]:
        """Role of each replica -> `"healthy"` or why it is out of use. A death is noticed when a call meets it."""
        return self._router.health()

    async def pull(self, version: int) -> None:
        """Every healthy replica loads a published version and drops its caches. Raises RuntimeError if none is left."""
        async with self._placement.turn("generator", "pull"):
            await self._on_all(lambda replica: replica.pull(version))
        self.policy_version = version

    async def load_hf(self, directory: str, *, version: int = 0) -> None:
        """Every healthy replica loads a Hugging Face directory; no trainer needed."""
        await self._on_all(lambda replica: replica.load_hf(directory, version))
        self.policy_version = version

    async def _on_all(self, call: Callable[[_Replica], Coroutine]) -> None:
        indices = self._router.healthy()
        results = await asyncio.gather(*(call(self._replicas[i]) for i in indices), return_exceptions=True)
        for index, result in zip(indices, results, strict=True):
            if isinstance(result, _ReplicaLost):
                self._lose(index, result)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, _ReplicaLost):
                raise result
        self._router.healthy()  # raises when none is left

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
        """Sends every request to the replica the router chooses."""
        try:
            indices = self._router.route(
                [request.tokens for request, _ in batch],
                version,
                held=[replica.held for replica in self._replicas],
                newest=self.policy_version,
            )
        except RuntimeError as error:
            _fail(batch, error)
            return
        shares: dict[int, list] = defaultdict(list)
        for index, call in zip(indices, batch, strict=True):
            shares[index].append(call)
        for index, share in shares.items():
            self._start(self._send(index, share, version))

    async def _send(self, index: int, batch: list, version: int | None) -> None:
        lost = False
        try:
            async with self._placement.turn("generator", "sample"):
                answers = await self._replicas[index].sample(
                    [request for request, _ in batch], version, self._timeout_s
                )
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    (future.set_exception if isinstance(answer, ValueError) else future.set_result)(answer)
        except _ReplicaLost as error:
            lost = True
            self._lose(index, error)
        except asyncio.CancelledError:
            _fail(batch, RuntimeError("sampling: the client was closed before the generators answered"))
            raise
        except Exception as error:
            _fail(batch, error)
        finally:
            self._router.finished(index, len(batch), version)
        if lost:
            self._dispatch([call for call in batch if not call[1].done()], version)

    def _lose(self, index: int, error: _ReplicaLost) -> None:
        """Takes a replica out of use. Whoever wants a new one in its place would start it here."""
        if not self._router.lose(index, str(error)):
            return
        left = list(self.health().values()).count("healthy")
        logger.warning("a generator replica is lost, %d left: %s", left, error)
        self._start(self._replicas[index].abandon(str(error)))

    def _start(self, work: Coroutine) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fail(batch: list, error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)

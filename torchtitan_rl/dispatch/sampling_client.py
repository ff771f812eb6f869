"""Sampling and scoring with any policy version, over replicas of the generator."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager

from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.role_mesh import RoleMesh
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.types import Completion, Request, SamplingParams

__all__ = ["SamplingClient"]


class _Replica:
    """One engine and which version it serves.

    A request that names a version has the engine to itself and others of that version until it is done; a
    request that does not is served by the newest, and a pull may change weights under it (its
    `policy_versions` then say so).
    """

    def __init__(self, mesh: RoleMesh, versions: PolicyVersions | None, verify: bool):
        self.mesh, self.versions, self.verify = mesh, versions, verify
        self.held: int | None = None
        self.newest: int | None = None
        self.load = 0
        self._naming, self._free = 0, 0
        self._changed = asyncio.Condition()

    async def pull(self, version: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._naming == 0)
            self.newest = version
            await self._load(version)  # even a version it holds: it may have been published again

    @asynccontextmanager
    async def serving(self, version: int | None):
        async with self._changed:
            if version is None:
                await self._changed.wait_for(lambda: self.held == self.newest or self._naming == 0)
                if self.held != self.newest:
                    await self._load(self.newest)
                self._free += 1
            else:
                await self._changed.wait_for(
                    lambda: self.held == version or (self._naming == 0 and self._free == 0))
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

    async def _load(self, version: int) -> None:
        if self.versions is not None:
            self.versions.pin(version, self.mesh.role)
        try:
            await self.mesh.call_all("fetch", version, self.verify)
        except BaseException:
            if self.versions is not None:
                await self.versions.release(version, self.mesh.role)
            raise
        await self._activate(version)

    async def load_hf(self, directory: str, version: int) -> None:
        """Serves the weights of a Hugging Face directory."""
        async with self._changed:
            self.newest = version
            await self.mesh.call_all("fetch_hf", directory, version)
            await self._activate(version)

    async def _activate(self, version: int) -> None:
        await self.mesh.call_rank(0, "load", version)
        previous, self.held = self.held, version
        if self.versions is not None and previous is not None:
            await self.versions.release(previous, self.mesh.role)
        self._changed.notify_all()


class SamplingClient:
    """`sample` and `score` over all replicas.

    Requests made before the event loop comes round again travel together and are admitted in the order they
    were made, before the engine's next iteration: the same requests give the same tokens. Equal prompts go
    to one replica, whose prefix cache then serves all but the first.
    """

    def __init__(
        self, replicas: list[RoleMesh], versions: PolicyVersions | None, *, max_model_len: int, timeout_s: float,
        verify: bool = True, placement: Placement | None = None,
    ):
        self._placement = placement or Placement()
        self._replicas = [_Replica(mesh, versions, verify) for mesh in replicas]
        self._max_model_len, self._timeout_s = max_model_len, timeout_s
        self._pending: dict[int | None, list[tuple[Request, asyncio.Future]]] = defaultdict(list)
        self._tasks: set[asyncio.Task] = set()

    @property
    def policy_version(self) -> int | None:
        """The version that requests without one are served by; None before the first pull."""
        return self._replicas[0].newest

    async def pull(self, version: int) -> None:
        """Every replica loads a published version and drops its caches."""
        async with self._placement.turn("generator", "pull"):
            await asyncio.gather(*(replica.pull(version) for replica in self._replicas))

    async def load_hf(self, directory: str, *, version: int = 0) -> None:
        """Every replica loads a Hugging Face directory; no trainer needed."""
        await asyncio.gather(*(replica.load_hf(directory, version) for replica in self._replicas))

    async def sample(
        self, tokens: list[int], params: SamplingParams, *, policy_version: int | None = None,
    ) -> Completion:
        """One completion. Raises ValueError when prompt and completion do not fit the context."""
        if len(tokens) + params.max_tokens > self._max_model_len:
            raise ValueError(
                f"prompt of {len(tokens)} tokens + max_tokens={params.max_tokens}: exceed "
                f"generator.max_model_len={self._max_model_len}; shorten one or raise the other")
        if not tokens:
            raise ValueError("prompt=[]: has no tokens; give at least one")
        completion = await self._submit(Request(list(tokens), params), policy_version)
        completion.filtered = params.top_k > 0 or params.top_p < 1.0
        return completion

    async def score(self, tokens: list[int], *, policy_version: int | None = None) -> list[float]:
        """Log-probability of every token but the first, at temperature 1."""
        if not 2 <= len(tokens) < self._max_model_len:
            raise ValueError(
                f"tokens of length {len(tokens)}: scoring needs at least 2 and fewer than "
                f"generator.max_model_len={self._max_model_len}")
        return await self._submit(Request(list(tokens), None), policy_version)

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
        for replica, batch in self._route(self._pending.pop(version)):
            task = asyncio.ensure_future(self._send(replica, batch, version))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _route(self, batch: list) -> list[tuple[_Replica, list]]:
        """Equal prompts together, each new prompt to the least loaded replica."""
        shares: dict[int, list] = defaultdict(list)
        home: dict[tuple[int, ...], int] = {}
        loads = [replica.load for replica in self._replicas]
        for request, future in batch:
            index = home.setdefault(tuple(request.tokens), loads.index(min(loads)))
            loads[index] += 1
            shares[index].append((request, future))
        return [(self._replicas[index], share) for index, share in shares.items()]

    async def _send(self, replica: _Replica, batch: list, version: int | None) -> None:
        replica.load += len(batch)
        try:
            async with self._placement.turn("generator", "sample"), replica.serving(version):
                answers = await replica.mesh.call_rank(
                    0, "sample", [request for request, _ in batch], timeout_s=self._timeout_s)
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
        except BaseException as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            replica.load -= len(batch)

"""Replicas of a generator in this process, for tests of who gets which request and of which version."""

import asyncio

from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.role_mesh import ProcessDied
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.types import Completion, SamplingParams
from torchtitan_rl.weights.layout import Manifest


class Mesh:
    """Answers like a generator mesh; `broken[endpoint]` is raised instead, `held_up` delays sampling, prompts in `slow`
    are answered last, once `released` is set; `fetching` holds up what fetches weights; versions in
    `refused[endpoint]` are refused there."""

    def __init__(self, role):
        self.role, self.num_ranks, self.broken, self.held_up = role, 2, {}, None
        self.refused = {"fetch": [], "load": []}
        self.sampled, self.loaded, self.aborted, self.cancelled = [], [], [], []
        self.waiting, self.slow, self.released, self.fetching = {}, [], asyncio.Event(), None
        self.loading = None  # holds up loads
        self.staged = set()  # versions that were fetched and not loaded yet

    async def call_rank(self, rank, operation):
        endpoint = operation.__name__
        assert endpoint == "abort"
        self.aborted.append(rank)
        raise died(self.role, endpoint)

    async def call_leader(self, operation, argument=None, requests=(), timeout_s=None):
        endpoint = operation.__name__
        if endpoint in self.broken:
            raise self.broken[endpoint]
        if endpoint == "probe":
            return None
        if endpoint == "cancel":
            return self.cancelled.append(argument)
        if endpoint == "load":
            if self.loading is not None:
                await self.loading.wait()
                if endpoint in self.broken:
                    raise self.broken[endpoint]
            if argument not in self.staged:
                raise RuntimeError(f"version {argument} is not staged")
            self.staged.remove(argument)
            if argument in self.refused["load"]:
                return ValueError(f"policy_version={argument}: cannot be loaded")
            self.loaded.append(argument)
            return 0.1
        self.sampled += [request.tokens for request in requests]
        if self.held_up is not None:
            await self.held_up.wait()
            if endpoint in self.broken:
                raise self.broken[endpoint]
        if requests:
            self.waiting[argument] = dict(enumerate(requests))
        waiting = self.waiting[argument]
        done = [index for index, request in waiting.items() if request.tokens not in self.slow]
        if not done:
            await self.released.wait()
            if endpoint in self.broken:
                raise self.broken[endpoint]
            done = list(waiting)
        return [(index, self._answer(waiting.pop(index))) for index in done]

    def _answer(self, request):
        if request.tokens == [13]:
            return ValueError("prompt of 1 tokens: token id 13 is out of vocabulary")
        if request.tokens == [14]:
            return None  # cancelled
        return Completion(tokens=request.tokens, logprobs=[], policy_versions=[self.loaded[-1]], finish_reason="stop")

    async def call_each(self, operation):
        assert operation.__name__ == "weights"
        return [{"version": version} for version in self.loaded[-1:]]

    async def call_all(self, operation, *args):
        endpoint = operation.__name__
        if endpoint in self.broken:
            raise self.broken[endpoint]
        if endpoint == "fetch" and self.fetching is not None:
            await self.fetching.wait()
        version = args[0].version if endpoint == "fetch" else args[1]
        if endpoint == "fetch" and version in self.refused["fetch"]:
            return ValueError(f"policy_version={version}: does not fit")
        self.staged.add(version)


class Weights:
    """Trainer and store of `PolicyVersions`: published versions are numbered 1, 2, ..."""

    def __init__(self):
        self.published, self.discarded = 0, []

    async def push_weights(self, dtype, transport, verify, adapters_apart):
        self.published += 1
        return Manifest(version=self.published, entries={}, nbytes=0)

    async def announce(self, manifest):
        pass

    async def discard_weights(self, version):
        self.discarded.append(version)

    async def discard(self, version):
        pass


class Config:
    transport, verify = "store", True


def client_of(num_replicas, repair=None, *, follows=False):
    meshes = [Mesh(f"generator-{i}") for i in range(num_replicas)]
    weights = Weights()
    versions = PolicyVersions(weights, weights, Config, None, one_host=True)
    client = MeshSamplingClient(meshes, versions, max_model_len=64, timeout_s=5, repair=repair, follows=follows)
    return meshes, versions, client


async def sample_all(client, prompts, **named):
    return await asyncio.wait_for(
        asyncio.gather(
            *(client.sample(prompt, SamplingParams(max_tokens=4), **named) for prompt in prompts),
            return_exceptions=True,
        ),
        5,
    )


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def died(role, endpoint):
    return ProcessDied(f"{role}-0.{endpoint}: its process died (killed); see its log")

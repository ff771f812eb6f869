"""Slots of an engine, and a replica that serves versions of adapters side by side."""

import asyncio

import pytest

from tests.kit.replicas import Config, Mesh, Weights, sample_all, settle
from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.resident_adapters import ResidentAdapters
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.types import WITHOUT_ADAPTERS, Completion, SamplingParams


def test_a_version_that_is_held_keeps_its_slot():
    adapters = ResidentAdapters(2)
    slots = {}
    for version in (1, 2):
        slots[version] = adapters.take_slot(version)
        adapters.put(version, slots[version])
    assert sorted(slots.values()) == [0, 1]
    adapters.hold(1)
    assert adapters.has_room(3) and adapters.take_slot(3) == slots[2] and 2 not in adapters
    adapters.put(3, slots[2])
    adapters.hold(3)
    assert not adapters.has_room(4) and adapters.has_room(3), "its own slot is there for newer adapters of a version"
    adapters.release(3)
    assert adapters.has_room(4)


def test_of_versions_that_nobody_holds_the_one_used_last_stays():
    adapters = ResidentAdapters(3)
    for version in (1, 2, 3):
        adapters.put(version, adapters.take_slot(version))
    adapters.hold(1), adapters.release(1)
    for version in (4, 5):
        adapters.put(version, adapters.take_slot(version))
    assert [version for version in (1, 2, 3, 4, 5) if version in adapters] == [1, 4, 5]


def test_a_slot_that_was_not_loaded_is_free_again():
    adapters = ResidentAdapters(1)
    adapters.give_back(1, adapters.take_slot(1))
    assert 1 not in adapters and adapters.take_slot(2) == 0


def test_a_slot_that_was_not_loaded_again_is_free_once_the_requests_in_it_have_ended():
    adapters = ResidentAdapters(1)
    slot = adapters.take_slot(1)
    adapters.put(1, slot)
    adapters.hold(1)
    adapters.give_back(1, adapters.take_slot(1))
    assert 1 not in adapters and not adapters.has_room(2) and not adapters.has_room(1)
    adapters.release(1)
    assert adapters.has_room(2) and adapters.take_slot(2) == slot


class SlotMesh(Mesh):
    """A generator mesh whose engine has slots: answers name the version whose adapters are in the request's slot."""

    def __init__(self, role):
        super().__init__(role)
        self.slots = {}
        self.refused["load_adapters"] = []

    async def call_leader(self, operation, argument, requests=(), timeout_s=None):
        if operation.__name__ != "load_adapters":
            return await super().call_leader(operation, argument, requests, timeout_s)
        assert argument in self.staged, "loaded before it was fetched"
        self.staged.remove(argument)
        if argument in self.refused["load_adapters"]:
            return ValueError(f"policy_version={argument}: cannot be loaded")
        self.slots[requests] = argument  # the slot
        self.loaded.append(argument)
        return 0.1

    def _answer(self, request):
        known = [WITHOUT_ADAPTERS, *self.slots.values()]
        assert request.adapter in known, "the adapters of a request are not in the engine"
        return Completion(tokens=request.tokens, logprobs=[], policy_versions=[request.adapter], finish_reason="stop")


def client_with_slots(num_slots):
    mesh, weights = SlotMesh("generator-0"), Weights()
    versions = PolicyVersions(weights, weights, Config, None, one_host=True, adapters_apart=True)
    client = MeshSamplingClient([mesh], versions, max_model_len=64, timeout_s=5, num_adapter_slots=num_slots)
    return mesh, versions, client


async def test_versions_are_served_side_by_side_and_each_is_loaded_once():
    mesh, versions, client = client_with_slots(3)
    for _ in range(3):
        await client.push_and_pull()
        versions.pin(versions.served, "test")
    mesh.held_up = asyncio.Event()
    waiting = [asyncio.ensure_future(sample_all(client, [[v, v]] * 4, policy_version=v)) for v in (1, 2, 3)]
    waiting.append(asyncio.ensure_future(sample_all(client, [[9]])))
    await settle()
    assert len(mesh.sampled) == 13, "all are in the engine together"
    mesh.held_up.set()
    answers = [completion for of_version in await asyncio.gather(*waiting) for completion in of_version]
    assert [c.policy_versions for c in answers] == [[1]] * 4 + [[2]] * 4 + [[3]] * 4 + [[3]]
    assert mesh.loaded == [1, 2, 3]


async def test_new_adapters_wait_while_every_slot_is_held_and_requests_keep_theirs():
    mesh, versions, client = client_with_slots(2)
    await client.push_and_pull()
    versions.pin(1, "test")
    mesh.held_up = asyncio.Event()
    first = asyncio.ensure_future(sample_all(client, [[5]]))
    await settle()
    await client.push_and_pull()
    second = asyncio.ensure_future(sample_all(client, [[6]]))
    await settle()
    third = asyncio.ensure_future(client.push_and_pull())
    await settle()
    assert not third.done() and mesh.loaded == [1, 2]
    mesh.held_up.set()
    assert (await first)[0].policy_versions == [1] and (await second)[0].policy_versions == [2]
    assert await asyncio.wait_for(third, 5) == 3
    assert (await sample_all(client, [[7]], policy_version=1))[0].policy_versions == [1]
    assert mesh.loaded == [1, 2, 3, 1], "version 1 had given its slot away"


async def test_the_base_answers_while_every_slot_is_held_and_its_completions_are_marked():
    mesh, versions, client = client_with_slots(2)
    (early,) = await sample_all(client, [[5]], policy_version=WITHOUT_ADAPTERS)
    assert "hold no weights yet" in str(early)
    mesh.held_up = asyncio.Event()
    waiting = []
    for version in (1, 2):
        await client.push_and_pull()
        waiting.append(asyncio.ensure_future(sample_all(client, [[version]])))
        await settle()
    waiting.append(asyncio.ensure_future(client.push_and_pull()))
    waiting.append(asyncio.ensure_future(sample_all(client, [[7], [8]], policy_version=WITHOUT_ADAPTERS)))
    await settle()
    assert not waiting[2].done() and len(mesh.sampled) == 4, "the base waits for no slot"
    mesh.held_up.set()
    *_, of_base = await asyncio.wait_for(asyncio.gather(*waiting), 5)
    assert [c.policy_versions for c in of_base] == [[WITHOUT_ADAPTERS]] * 2 and mesh.loaded == [1, 2, 3]
    assert {c.filtered for c in of_base} == {"policy_version=-1"}, "training refuses them"
    assert client.in_flight() == [0] and client._router.loads == [0]


async def test_adapters_that_are_refused_are_an_error_of_their_requests_alone():
    mesh, versions, client = client_with_slots(2)
    await client.push_and_pull()
    mesh.refused["load_adapters"] = [2]
    await versions.publish_for("test")
    (error,) = await sample_all(client, [[5]], policy_version=2)
    assert "cannot be loaded" in str(error) and client.health() == {"generator-0": "healthy"}
    assert (await sample_all(client, [[5]]))[0].policy_versions == [1]


async def test_who_waits_for_a_slot_of_a_replica_that_is_lost_is_told():
    mesh, versions, client = client_with_slots(2)
    await client.push_and_pull()
    versions.pin(1, "test")
    mesh.held_up = asyncio.Event()
    calls = [asyncio.ensure_future(client.sample([5], SamplingParams(max_tokens=4)))]
    await settle()
    await client.push_and_pull()
    await versions.publish_for("test")
    calls.append(asyncio.ensure_future(client.sample([6], SamplingParams(max_tokens=4))))
    calls.append(asyncio.ensure_future(client.sample([7], SamplingParams(max_tokens=4), policy_version=3)))
    await settle()
    mesh.broken["sample"] = RuntimeError("generator-0.sample: died")
    mesh.held_up.set()
    for call in calls:
        with pytest.raises(RuntimeError, match="no generator replica is left"):
            await asyncio.wait_for(call, 5)

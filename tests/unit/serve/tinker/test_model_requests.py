"""Requests of models that cross: of a model that is unloaded meanwhile, and saves beside other saves."""

import asyncio
from types import SimpleNamespace

import torch

from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.serve.tinker import requests
from torchtitan_rl.serve.tinker.bodies import (
    CreateModelBody,
    LoadWeightsBody,
    SaveExternalBody,
    SaveForSamplerBody,
    SaveWeightsBody,
)
from torchtitan_rl.serve.tinker.futures import Futures
from torchtitan_rl.serve.tinker.models import ModelPlaces, Models
from torchtitan_rl.serve.tinker.requests import ModelRequests
from torchtitan_rl.serve.tinker.samplers import Versions
from torchtitan_rl.serve.tinker.saved_states import ModelRecord, SavedStates
from torchtitan_rl.serve.tinker.service import Service
from torchtitan_rl.weights import layout
from torchtitan_rl.weights.versioned import MemoryStore


class Server:
    """Models that train all parameters, one owner's, in a directory; `live` are in the trainer at the start."""

    def __init__(self, directory, trainer, *live, versions=None, max_models=1):
        self.silent = set()
        self.checkpoints, self.futures = SavedStates(directory), Futures()
        places = ModelPlaces(trainer, lora=None, max_models=max_models, wait_s=5)
        self.models = Models(
            places,
            self.checkpoints,
            self.futures,
            base_model="b",
            base_dir=directory,
            vocab_size=9,
            end_tokens={},
            silent=lambda session: session in self.silent,
            hear=lambda session: None,
        )
        for name in live:
            self.models.live[name] = self.models.new(ModelRecord(model_id=name, base_model="b"), name)
        self.requests = ModelRequests(self.models, versions, self.futures)

    async def answer(self, request_id):
        answer = await self.futures.fetch(request_id, 5)
        return getattr(answer, "message", "") or answer.content.decode()


class Recording:
    """A trainer that notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        async def answered():
            self.calls.append(name)
            await asyncio.sleep(0.01)

        return lambda *args, **kwargs: asyncio.ensure_future(answered())


async def test_a_model_that_was_unloaded_while_its_state_was_read_loads_nothing_into_the_next_one(
    tmp_path, monkeypatch
):
    async def slow(directory):
        await asyncio.sleep(0.2)

    monkeypatch.setattr(requests, "require_intact", slow)
    server = Server(tmp_path, trainer := Recording())
    old = ModelRecord(model_id="old:train:0", base_model="b")
    server.checkpoints.begin(old, "weights", "w", overwrite=False)
    server.checkpoints.commit(old, "weights", "w", ttl_s=None, metadata=None)
    body = LoadWeightsBody(session_id="A", model_seq_id=0, path="tinker://old:train:0/weights/w", optimizer=True)
    first = server.requests.create_from(body)
    await asyncio.sleep(0.05)
    server.silent.add("A")
    second = server.models.create(CreateModelBody(session_id="B", model_seq_id=0, base_model="b"))
    assert "create_model" in await server.answer(second)
    assert "was unloaded while its state was read" in await server.answer(first)
    assert list(server.models.live) == ["B:train:0"] and "load_checkpoint" not in trainer.calls


class Numbered:
    """Versions, of which each publication is another one."""

    def __init__(self):
        self.number = 0

    async def publish(self):
        self.number += 1
        return self.number

    async def save(self, version, file):
        await asyncio.sleep(0.05)
        file.write_text(f"weights of version {version}")

    def leave(self, version):
        pass

    async def forget(self, version):
        pass


async def test_a_second_save_under_the_name_of_one_that_is_being_written_is_refused(tmp_path):
    server = Server(tmp_path, None, "m", versions=Numbered())
    body = SaveForSamplerBody(model_id="m", path="latest", overwrite=True)
    first, second = [
        server.requests.save_for_sampler(body.model_copy(update={"seq_id": i}), lambda model, version: {})
        for i in (1, 2)
    ]
    assert "tinker://m/sampler_weights/latest" in await server.answer(first)
    assert "path='latest': is being saved; await that save" in await server.answer(second)
    assert [file.read_text() for file in tmp_path.rglob("weights.safetensors")] == ["weights of version 1"]
    third = server.requests.save_for_sampler(body.model_copy(update={"seq_id": 3}), lambda model, version: {})
    assert "latest" in await server.answer(third)


class Staging:
    """A trainer that writes one checkpoint at a time, for half a second after a copy of a tenth."""

    def __init__(self):
        self.lock, self.until = asyncio.Lock(), 0.0

    async def stage_checkpoint(self, directory):
        await asyncio.shield(asyncio.ensure_future(self._stage()))

    async def _stage(self):
        async with self.lock:
            await asyncio.sleep(0.1)
            now = asyncio.get_running_loop().time()
            if now < self.until:
                raise RuntimeError("stage_checkpoint: the checkpoint before is still being written")
            self.until = now + 0.5

    async def checkpoint_written(self):
        await asyncio.sleep(max(0.0, self.until - asyncio.get_running_loop().time()) + 0.01)
        return {}


async def test_a_model_that_is_unloaded_while_it_is_saved_leaves_no_save_to_fail(tmp_path):
    server = Server(tmp_path, Staging(), "A", "B", max_models=2)
    server.requests.save(SaveWeightsBody(model_id="A", seq_id=1))
    await asyncio.sleep(0.05)
    second = server.requests.save(SaveWeightsBody(model_id="B", seq_id=1))
    server.models.remove(server.models.live["A"], "its session was finished")
    assert '"type": "save_weights"' in await server.answer(second)


class Pushing:
    """A trainer that publishes the next of its versions, filled with the version's number, call after call."""

    def __init__(self, store, versions, push_s=0.0):
        self.store, self.versions, self.push_s = store, list(versions), push_s
        self.lock, self.buffers = asyncio.Lock(), layout.SharedBuffers()

    async def push_weights(self, *args):
        async with self.lock:
            version = self.versions.pop(0)
            await asyncio.sleep(self.push_s)
            manifest = layout.plan(version, [("w", (4,), torch.float32, True)], None)
            handle, payload = self.buffers.take(version, manifest.nbytes)
            payload.view(torch.float32).fill_(version)
            await self.store.keep(manifest, payload, handle=handle)
            return manifest

    async def discard_weights(self, version):
        async with self.lock:
            self.buffers.release(version)


def policy_versions(numbers, push_s=0.0):
    store = MemoryStore()
    config = SimpleNamespace(transport="shared_memory", verify=False)
    trainer = Pushing(store, numbers, push_s)
    return trainer, PolicyVersions(trainer, store, config, torch.float32, one_host=True)


async def test_weights_with_names_leave_the_store_and_take_no_room_of_those_without(tmp_path):
    _, published = policy_versions(range(1, 20))
    versions = Versions(published, max_published=2, max_spooled=3, spool=tmp_path / "spool")
    server = Server(tmp_path / "models", None, "m", versions=versions)

    async def save(number, path):
        def session_of(model, version):
            versions.add_sampler(version)
            return {"version": version}

        body = SaveForSamplerBody(model_id="m", seq_id=number, path=path)
        return await server.answer(server.requests.save_for_sampler(body, session_of))

    assert '"version": 1' in await save(1, None)
    for number in range(2, 12):
        assert f"sampler_weights/step-{number}" in await save(number, f"step-{number}")
    assert list((tmp_path / "spool").iterdir()) == [] and 2 not in versions
    async with versions.published(1):
        pass
    assert list(published.holders()) == [1]


async def test_a_version_that_is_published_again_while_it_is_pushed_out_keeps_its_weights(tmp_path):
    _, published = policy_versions([1, 2, 1, 3], push_s=0.1)
    versions = Versions(published, max_published=1, max_spooled=9, spool=tmp_path / "spool")

    async def publish():
        version = await versions.publish()
        versions.leave(version)
        return version

    await publish()
    assert await asyncio.gather(publish(), publish()) == [2, 1]
    async with versions.published(1):
        await publish()
        assert (await published.tensors(1))["w"].tolist() == [1.0] * 4


async def test_weights_of_a_model_that_is_unloaded_while_they_are_published_stay_nowhere(tmp_path):
    trainer, published = policy_versions([7, 8], push_s=0.1)
    versions = Versions(published, max_published=2, max_spooled=3, spool=tmp_path / "spool")
    server = Server(tmp_path / "models", None, "m", versions=versions)
    body = SaveForSamplerBody(model_id="m", seq_id=1)
    answer = server.requests.save_for_sampler(body, lambda model, version: {})
    await asyncio.sleep(0.05)
    server.models.remove(server.models.live["m"], "its session was finished")
    assert "is unloaded (its session was finished)" in await server.answer(answer)
    assert await published.publish_for("another model") == 8  # the trainer has published the first by now
    await asyncio.sleep(0.05)
    assert list(trainer.buffers.used) == [8] and published.holders() == {8: ["another model"]}


async def test_a_save_that_fails_leaves_no_directory_and_one_that_was_cut_off_is_deleted_at_the_next_start(tmp_path):
    class Full:
        async def publish(self):
            raise RuntimeError("policy-0.push_weights: No space left on device")

        async def save_hf_model(self, *args, **kwargs):
            raise RuntimeError("policy-0.save_hf_model: No space left on device")

        async def stage_checkpoint(self, directory):
            raise RuntimeError("policy-0.stage_checkpoint: No space left on device")

    server = Server(tmp_path, Full(), "m", versions=Full())
    named = SaveForSamplerBody(model_id="m", path="s", seq_id=1)
    for request in (
        server.requests.save_for_sampler(named, lambda model, version: {}),
        server.requests.save(SaveWeightsBody(model_id="m", path="w", seq_id=2)),
        server.requests.save_external(SaveExternalBody(model_id="m", path="e", seq_id=3)),
    ):
        assert "No space left on device" in await server.answer(request)
    assert [path for path in tmp_path.rglob(".*")] == []
    server.checkpoints.begin(ModelRecord(model_id="m", base_model="b"), "weights", "w", overwrite=False)
    assert [path.name for path in tmp_path.rglob(".*")] == [".w.writing"]
    SavedStates(tmp_path)
    assert [path for path in tmp_path.rglob(".*")] == []


def test_files_of_an_earlier_servers_versions_are_deleted(tmp_path):
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "1000007.safetensors").touch()
    Versions(None, max_published=1, max_spooled=1, spool=tmp_path / "spool")
    assert list((tmp_path / "spool").iterdir()) == []


async def test_a_model_that_the_trainer_cannot_make_leaves_its_place(tmp_path):
    class Full:
        async def init_model(self, directory):
            raise RuntimeError("policy-0.init_model: OutOfMemoryError")

    server = Server(tmp_path, Full())
    for index in range(2):  # the second reaches the trainer too
        body = CreateModelBody(session_id="A", model_seq_id=index, base_model="b")
        assert "OutOfMemoryError" in await server.answer(server.models.create(body))
    assert not server.models.live


async def test_a_model_that_cannot_be_described_takes_no_place(tmp_path, monkeypatch):
    def full(record):
        raise OSError(28, "No space left on device")

    server = Server(tmp_path, None)
    monkeypatch.setattr(server.checkpoints, "describe", full)
    body = CreateModelBody(session_id="A", model_seq_id=0, base_model="b")
    assert "No space left" in await server.answer(server.models.create(body))
    assert not server.models.live and server.models.places.free()


async def test_two_saves_without_any_number_are_two_sampling_sessions():
    opened = []

    class Sampling:
        def open(self, sampler_id, session_id, **weights):
            opened.append(sampler_id)
            return SimpleNamespace(sampler_id=sampler_id)

    class Requests:
        def save_for_sampler(self, body, session_of):
            return session_of(SimpleNamespace(session_id="A", model_id=body.model_id), 1)

    service = SimpleNamespace(sampling=Sampling(), requests=Requests())
    for model, seq_id in ((0, None), (0, None), (0, 7), (1, 7)):
        Service.save_for_sampler(service, SaveForSamplerBody(model_id=f"A:train:{model}", seq_id=seq_id))
    assert len(set(opened)) == 4 and opened[-2:] == ["A:sample:s0-7", "A:sample:s1-7"]

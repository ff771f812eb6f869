"""Turns of versions, and which versions are in the store."""

import asyncio

import pytest

from torchtitan_rl.serve.tinker.faults import Fault
from torchtitan_rl.serve.tinker.samplers import Turns, Versions
from torchtitan_rl.serve.tinker.saved_states import ModelRecord, SavedStates


async def test_versions_never_mix_and_each_gets_its_turn():
    turns, inside, seen = Turns(turn_s=0.01), {}, []

    async def request(version):
        async with turns.of(version):
            inside[version] = inside.get(version, 0) + 1
            assert [v for v, number in inside.items() if number] == [version]
            seen.append(version)
            await asyncio.sleep(0.002)
            inside[version] -= 1

    async def client(version):
        for _ in range(20):
            await request(version)

    await asyncio.wait_for(asyncio.gather(*(client(v) for v in (1, 2, 3) for _ in range(4))), 20)
    assert sorted(seen) == [1] * 80 + [2] * 80 + [3] * 80
    assert 3 <= turns.num_turns < 120, "requests of a version share a turn"
    assert set(seen[: len(seen) // 2]) == {1, 2, 3}, "nobody waits until another version has nothing left to ask"


async def test_a_request_that_is_cancelled_while_it_waits_holds_nobody_up():
    turns = Turns(turn_s=0.0)

    async def hold(version, seconds):
        async with turns.of(version):
            await asyncio.sleep(seconds)

    first = asyncio.ensure_future(hold(1, 0.05))
    await asyncio.sleep(0)
    cancelled = [asyncio.ensure_future(hold(2, 10)) for _ in range(3)]
    last = asyncio.ensure_future(hold(3, 0))
    await asyncio.sleep(0.01)
    for task in cancelled:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(first, last), 2)

    assert turns.version == 3


class Store:
    """Of `PolicyVersions`, what `Versions` asks for: which version is published, and who holds it."""

    def __init__(self):
        self.holders, self.next, self.saves = {}, 1, []

    async def publish_for(self, holder):
        self.holders[self.next] = self.holders.get(self.next, 0) + 1
        return self.next

    def pin(self, version, holder):
        self.holders[version] = self.holders.get(version, 0) + 1

    async def release(self, version, holder):
        self.holders[version] -= 1
        if not self.holders[version]:
            del self.holders[version]

    async def save(self, version, file):
        assert version in self.holders, "only what is published can be written"
        await asyncio.sleep(0.001)
        self.saves.append(version)
        file.write_text(str(version))

    async def publish_file(self, version, file, holder):
        assert file.read_text() == str(version)
        self.pin(version, holder)


async def published(versions):
    version = await versions.publish()
    versions.leave(version)
    return version


async def test_versions_beyond_the_bound_wait_on_disk_and_come_back(tmp_path):
    store = Store()
    versions = Versions(store, max_published=2, max_spooled=9, spool=tmp_path / "spool")
    for store.next in (1, 2, 3, 4):
        assert await published(versions) == store.next
    pushed_out = sorted(store.holders)
    async with versions.published(1):
        back = sorted(store.holders)
    await published(versions)  # the same version again
    again = dict(store.holders)
    await versions.forget(1)
    left, files = sorted(store.holders), sorted(file.name for file in (tmp_path / "spool").iterdir())
    assert pushed_out == [3, 4] and back == [1, 3, 4] and again == {1: 1, 4: 1}
    assert left == [4] and files == ["2.safetensors", "3.safetensors"]


async def test_a_version_that_cannot_be_written_stays_in_the_store_until_it_can(tmp_path):
    class FullDisk(Store):
        full = True

        async def save(self, version, file):
            if self.full:
                raise OSError(28, "No space left on device")
            await super().save(version, file)

    store = FullDisk()
    versions = Versions(store, max_published=1, max_spooled=9, spool=tmp_path / "spool")
    await published(versions)
    for store.next in (2, 3):
        with pytest.raises(OSError, match="No space"):
            await published(versions)
    assert sorted(store.holders) == [1, 2, 3]

    store.full, store.next = False, 4
    await published(versions)
    async with versions.published(1):
        assert 1 in store.holders
    assert store.saves[:3] == [1, 2, 3]


async def test_a_version_that_is_being_published_again_is_not_forgotten(tmp_path):
    class Slow(Store):
        pushing = None

        async def publish_for(self, holder):
            if self.pushing is not None:
                await self.pushing
            return await super().publish_for(holder)

    store = Slow()
    versions = Versions(store, max_published=2, max_spooled=9, spool=tmp_path / "spool")
    await published(versions)
    store.pushing = asyncio.get_running_loop().create_future()
    again = asyncio.ensure_future(versions.publish())
    await asyncio.sleep(0)
    await versions.forget(1)
    assert 1 in store.holders
    store.pushing.set_result(None)
    assert await again == 1 and 1 in store.holders


async def test_a_version_in_use_is_never_pushed_out(tmp_path):
    store = Store()
    versions = Versions(store, max_published=1, max_spooled=9, spool=tmp_path / "spool")
    await published(versions)
    async with versions.published(1):
        for store.next in (2, 3):
            await published(versions)
        await versions.forget(1)
        assert 1 in store.holders
    await versions.forget(1)

    assert sorted(store.holders) == [3]


async def test_a_checkpoint_that_was_deleted_is_named(tmp_path):
    with pytest.raises(Fault, match="was deleted"):
        versions = Versions(Store(), max_published=1, max_spooled=9, spool=tmp_path / "spool")
        versions.register(-1, tmp_path / "gone.safetensors")
        async with versions.published(-1):
            pass


async def test_weights_saved_in_place_of_others_are_not_taken_for_them(tmp_path):
    """A sampling session keeps the weights that it was opened with, or says that they are gone."""
    store, checkpoints = Store(), SavedStates(tmp_path / "models")
    versions = Versions(store, max_published=1, max_spooled=9, spool=tmp_path / "spool")
    record = ModelRecord(model_id="ab12:train:0", base_model="tiny")

    def save(version):
        writing = checkpoints.begin(record, "sampler_weights", "latest", overwrite=True)
        (writing / "weights.safetensors").write_text(str(version))
        path = checkpoints.commit(record, "sampler_weights", "latest", ttl_s=None, metadata=None).path
        return checkpoints.find(path)[1] / "weights.safetensors"

    versions.register(-1, save(-1))
    async with versions.published(-1):
        versions.register(-2, save(-2))
    async with versions.published(-2):
        await published(versions)  # pushes -1 out of the store
    with pytest.raises(Fault, match="version=-1: other weights were saved in place of its checkpoint"):
        async with versions.published(-1):
            pass


async def test_versions_without_a_name_are_bounded_on_disk_too_and_the_ones_used_least_recently_go(tmp_path):
    store = Store()
    versions = Versions(store, max_published=1, max_spooled=2, spool=tmp_path / "spool")
    for store.next in (1, 2, 3):
        await published(versions)
    async with versions.published(1):  # used again
        pass
    for store.next in (4, 5):
        await published(versions)
    left = [version for version in range(1, 6) if version in versions]
    with pytest.raises(Fault, match="was dropped: many newer ones have no name"):
        async with versions.published(2):
            pass
    files = sorted(file.name for file in (tmp_path / "spool").iterdir())
    assert left == [1, 4, 5] and files == ["1.safetensors", "4.safetensors"]


async def test_a_damaged_file_is_a_fault_of_the_request_and_is_never_published(tmp_path, caplog):
    """Of a checkpoint, and of weights without a name that the server wrote; one without checksums is used."""
    store, checkpoints = Store(), SavedStates(tmp_path / "models")
    versions = Versions(store, max_published=1, max_spooled=9, spool=tmp_path / "spool")
    record = ModelRecord(model_id="ab12:train:0", base_model="tiny")
    messages = []
    for version, name in ((-1, "flipped"), (-2, "fine"), (-3, "old")):
        writing = checkpoints.begin(record, "sampler_weights", name, overwrite=False)
        (writing / "weights.safetensors").write_text(str(version))
        path = checkpoints.commit(record, "sampler_weights", name, ttl_s=None, metadata=None).path
        if name == "old":
            (checkpoints.find(path)[1] / "files.json").unlink()
        versions.register(version, checkpoints.find(path)[1] / "weights.safetensors")
    flipped = tmp_path / "models" / record.model_id / "sampler_weights" / "flipped" / "weights.safetensors"
    flipped.write_text("-3")
    for store.next in (1, 2):
        await published(versions)
    (tmp_path / "spool" / "1.safetensors").write_text("2")
    for version in (-1, 1):
        with pytest.raises(Fault) as fault:
            async with versions.published(version):
                pass
        assert fault.value.category == "user" and version not in store.holders
        messages.append(fault.value.message)
    for version in (-2, -3):
        async with versions.published(version):
            assert version in store.holders
    checkpoint, spooled = messages
    assert "weights.safetensors: its checksum is" in checkpoint and "version=1: its file is damaged" in spooled
    assert "was saved without checksums by an older server" in caplog.text


async def test_a_version_that_is_published_while_its_file_is_read_is_held_once(tmp_path):
    class Reading(Store):
        reading = None

        async def publish_file(self, version, file, holder):
            if self.reading is not None:
                await self.reading()
            await super().publish_file(version, file, holder)

    store = Reading()
    versions = Versions(store, max_published=1, max_spooled=9, spool=tmp_path / "spool")
    for store.next in (1, 2):
        await published(versions)

    publishing = []

    async def publish_meanwhile():
        store.next = 1
        publishing.append(asyncio.ensure_future(published(versions)))
        await asyncio.sleep(0.01)

    store.reading = publish_meanwhile
    async with versions.published(1):
        assert store.holders[1] == 1
    await asyncio.gather(*publishing)
    assert store.holders[1] == 1

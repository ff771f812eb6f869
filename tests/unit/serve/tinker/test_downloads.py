"""Links to weights: how long they are valid, and what a slow archive answers."""

import asyncio
import io
import tarfile
import time
from functools import partial

import pytest
from starlette.testclient import TestClient

from tests.kit.tinker import served
from torchtitan_rl.serve.guard import allowed_hosts
from torchtitan_rl.serve.tinker.app import guarded, make_app
from torchtitan_rl.serve.tinker.downloads import Downloads, write_hf_form
from torchtitan_rl.serve.tinker.faults import Fault, user
from torchtitan_rl.serve.tinker.owners import OneKey
from torchtitan_rl.serve.tinker.saved_states import Checkpoint, ModelRecord
from torchtitan_rl.serve.tinker.service import Server, TinkerLimits

CHECKPOINT = Checkpoint(
    model=ModelRecord(model_id="ab12:train:0", base_model="base"), kind="weights", name="kept", time="2026-11-24"
)


def saved(directory):
    directory.mkdir()
    (directory / "checkpoint.json").write_text("{}")
    return directory


def write(checkpoint, source, target):
    (target / "weights").write_text("numbers")


async def test_an_archive_is_written_once_and_goes_with_its_link(tmp_path):
    source, written = saved(tmp_path / "kept"), []
    downloads = Downloads(tmp_path / "archives", lambda *of: written.append(write(*of)), valid_s=0.5)
    link = await downloads.archive(CHECKPOINT, source, 5.0)
    assert await downloads.archive(CHECKPOINT, source, 5.0) == link and len(written) == 1
    file = downloads.file(link.token, "kept.tar")
    assert tarfile.open(file).getnames() == ["checkpoint_complete", "weights"]
    for token, name in ((link.token, "other.tar"), ("x", "kept.tar"), (link.token, "../kept.tar")):
        with pytest.raises(Fault, match="has expired, or its checkpoint was deleted"):
            downloads.file(token, name)
    time.sleep(0.6)
    with pytest.raises(Fault, match="has expired"):
        downloads.file(link.token, "kept.tar")
    assert not file.exists() and not list((tmp_path / "archives").iterdir())
    assert (await downloads.archive(CHECKPOINT, source, 5.0)).token != link.token and len(written) == 2


async def test_a_link_of_a_deleted_checkpoint_leads_nowhere(tmp_path):
    source = saved(tmp_path / "kept")
    downloads = Downloads(tmp_path / "archives", write, valid_s=60.0)
    link = await downloads.archive(CHECKPOINT, source, 5.0)
    (source / "checkpoint.json").unlink()
    with pytest.raises(Fault, match="its checkpoint was deleted") as fault:
        downloads.file(link.token, "kept.tar")
    assert fault.value.status == 404


async def test_a_slow_archive_is_asked_for_again_and_one_that_failed_is_written_again(tmp_path):
    source, fails = saved(tmp_path / "kept"), [True]

    def slow(checkpoint, source, target):
        time.sleep(0.3)
        if fails:
            raise OSError(f"no space left: {fails.pop()}")
        write(checkpoint, source, target)

    downloads = Downloads(tmp_path / "archives", slow, valid_s=60.0)
    with pytest.raises(Fault, match="ask again") as fault:
        await downloads.archive(CHECKPOINT, source, 0.05)
    assert fault.value.status == 503
    with pytest.raises(OSError, match="no space left"):
        await downloads.archive(CHECKPOINT, source, 5.0)
    assert (await downloads.archive(CHECKPOINT, source, 5.0)).files


async def test_an_archive_that_fails_leaves_nothing_on_disk(tmp_path, monkeypatch):
    source, add = saved(tmp_path / "kept"), tarfile.TarFile.add

    def until_the_disk_is_full(tar, *args, arcname, **more):
        add(tar, *args, arcname=arcname, **more)
        if arcname == "weights":
            raise OSError("no space left")

    monkeypatch.setattr(tarfile.TarFile, "add", until_the_disk_is_full)
    downloads = Downloads(tmp_path / "archives", write, valid_s=60.0)
    with pytest.raises(OSError, match="no space left"):
        await downloads.archive(CHECKPOINT, source, 5.0)
    assert not list((tmp_path / "archives").iterdir())


def test_archives_of_an_earlier_server_are_deleted(tmp_path):
    (tmp_path / "archives").mkdir()
    (tmp_path / "archives" / "old.tar").write_text("numbers")
    Downloads(tmp_path / "archives", write, valid_s=60.0)
    assert not (tmp_path / "archives").exists()


@pytest.fixture
def http(tmp_path):
    """(client, directory of a checkpoint for other programs) at a server without a key, behind its guard."""
    model = served(tmp_path, lora=None, write_form=partial(write_hf_form, model=None, model_dir=tmp_path))
    server = Server(model, None, None, None, tmp_path, TinkerLimits())
    store, record = server.service("").checkpoints, CHECKPOINT.model
    (store.begin(record, "external_weights", "kept", overwrite=False) / "model.safetensors").write_text("numbers")
    path = store.commit(record, "external_weights", "kept", ttl_s=None, metadata=None).path
    app = guarded(make_app(server, OneKey()), allowed_hosts("127.0.0.1", False))
    with TestClient(app, base_url="http://127.0.0.1:8000", follow_redirects=False) as client:
        yield client, store.find(path)[1]


RUN = "/api/v1/training_runs/ab12:train:0/checkpoints/external_weights/kept"


def test_links_and_archives_hold_what_was_saved_and_not_the_servers_own_records(http):
    client, _ = http
    urls = client.get(f"{RUN}/external_weights_urls").json()["urls"]
    assert list(urls) == ["model.safetensors"]
    assert client.get(urls["model.safetensors"]).text == "numbers"
    answer = client.get(f"{RUN}/archive")
    assert answer.status_code == 302
    tar = tarfile.open(fileobj=io.BytesIO(client.get(answer.headers["Location"]).content))
    assert tar.getnames() == ["checkpoint_complete", "model.safetensors"]


def test_a_damaged_checkpoint_is_not_taken_away(http):
    client, directory = http
    (directory / "model.safetensors").write_text("numberz")
    for way in ("external_weights_urls", "archive"):
        answer = client.get(f"{RUN}/{way}")
        assert answer.status_code == 400 and "checkpoint is damaged" in answer.json()["error"], (way, answer.text)
    (directory / "model.safetensors").write_text("numbers")
    assert client.get(f"{RUN}/archive").status_code == 302


def test_a_link_is_for_programs_and_for_this_server_alone(http):
    """The guard lets a link be read by curl and by a person's click, and by no page of another site."""
    client, _ = http
    url = client.get(f"{RUN}/external_weights_urls").json()["urls"]["model.safetensors"]
    click = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get(url, headers=click).text == "numbers"
    assert client.get(url, headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.get(url, headers={"Host": "evil.example"}).status_code == 421


async def test_all_who_ask_for_a_damaged_checkpoint_are_told_why(tmp_path):
    def fails(checkpoint, source, target):
        raise user("is damaged")

    source = saved(tmp_path / "kept")
    downloads = Downloads(tmp_path / "archives", fails, valid_s=9.0)
    asking = [downloads.archive(CHECKPOINT, source, 5.0) for _ in range(3)]
    answers = await asyncio.gather(*asking, return_exceptions=True)
    assert [str(answer) for answer in answers] == ["is damaged"] * 3

"""Checkpoints on disk: names, overwriting, expiry, what is found again."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from torchtitan_rl.serve.tinker import saved_states
from torchtitan_rl.serve.tinker.faults import Fault
from torchtitan_rl.serve.tinker.saved_states import ModelRecord, SavedStates

MODEL = ModelRecord(model_id="ab12:train:0", base_model="tiny", lora_rank=8)


def saved(store, name="one", kind="weights", **more):
    writing = store.begin(MODEL, kind, name, overwrite=more.pop("overwrite", False))
    (writing / "data").write_bytes(b"12345")
    return store.commit(MODEL, kind, name, ttl_s=more.get("ttl_s"), metadata=more.get("metadata"))


def test_what_was_saved_is_found_again_after_a_restart(tmp_path):
    checkpoint = saved(SavedStates(tmp_path), metadata={"a": "b"})
    assert checkpoint.path == "tinker://ab12:train:0/weights/one"
    found, directory = SavedStates(tmp_path).find(checkpoint.path, "weights")
    assert found == checkpoint and (directory / "data").read_bytes() == b"12345"
    assert found.as_wire()["checkpoint_id"] == "weights/one" and found.size_bytes == 5
    assert SavedStates(tmp_path).model("ab12:train:0") == MODEL
    assert [record.model_id for record in SavedStates(tmp_path).models()] == ["ab12:train:0"]


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../weights/one",
        "tinker://ab12:train:0/weights/..",
        "tinker://ab12:train:0/weights/.one.writing",
        "tinker://ab12:train:0/weights/a/b",
        "tinker://ab12:train:0/other/one",
        "tinker:///weights/one",
        "file:///etc/passwd",
        "tinker://ab12:train:0/weights/" + "x" * 200,
        "tinker://ab12:train:0/weights/a\0b",
    ],
)
def test_a_path_that_leaves_the_directory_or_has_another_form_is_refused(tmp_path, path):
    store = SavedStates(tmp_path / "models")
    saved(store)
    with pytest.raises(Fault) as fault:
        store.find(path)
    assert fault.value.category == "user"


@pytest.mark.parametrize("name", ["../x", "", ".hidden", "a/b", "a b", "x" * 129, "ü"])
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path, name):
    with pytest.raises(Fault, match="use another name"):
        saved(SavedStates(tmp_path), name)


def test_a_name_is_used_once_unless_overwriting_is_asked_for(tmp_path):
    store = SavedStates(tmp_path)
    saved(store)
    with pytest.raises(Fault, match="has saved it already"):
        saved(store)
    saved(store, overwrite=True)


def test_a_server_killed_while_it_overwrites_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    store = SavedStates(tmp_path)
    before = saved(store, metadata={"number": 1})

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda path, to: killed() if path.name.endswith(".writing") else path.replace(to))
        with pytest.raises(KeyboardInterrupt):
            saved(store, metadata={"number": 2}, overwrite=True)
    assert SavedStates(tmp_path).of(MODEL.model_id) == [before]

    with monkeypatch.context() as patch:  # killed when the new one is there
        patch.setattr(saved_states.shutil, "rmtree", lambda path, **_: killed() if path.exists() else None)
        with pytest.raises(KeyboardInterrupt):
            saved(store, metadata={"number": 3}, overwrite=True)
    assert [one.user_metadata for one in SavedStates(tmp_path).of(MODEL.model_id)] == [{"number": 3}]
    assert [path for path in tmp_path.rglob(".*")] == []


def test_a_checkpoint_that_was_cut_off_is_none(tmp_path):
    store = SavedStates(tmp_path)
    (store.begin(MODEL, "weights", "half", overwrite=False) / "data").write_bytes(b"1")
    assert store.of(MODEL.model_id) == []
    with pytest.raises(Fault, match="there is no such checkpoint"):
        store.find("tinker://ab12:train:0/weights/half")


def test_one_to_sample_from_is_none_to_train_on(tmp_path):
    store = SavedStates(tmp_path)
    path = saved(store, kind="sampler_weights").path
    with pytest.raises(Fault, match="is none to train on; give tinker://MODEL/weights/NAME"):
        store.find(path, "weights")


def test_checkpoints_expire_are_deleted_and_listed_newest_first(tmp_path):
    store = SavedStates(tmp_path)
    for name in ("a", "b", "c"):
        saved(store, name, ttl_s=3600)
    assert [checkpoint.name for checkpoint in store.of(MODEL.model_id)] == ["c", "b", "a"]
    file = tmp_path / MODEL.model_id / "weights" / "a" / "checkpoint.json"
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"expires_at": past}))
    assert [checkpoint.name for checkpoint in store.of(MODEL.model_id)] == ["c", "b"] and not file.parent.exists()
    store.set_ttl(MODEL.model_id, "weights/b", None)
    assert store.find("tinker://ab12:train:0/weights/b")[0].expires_at is None
    store.remove(MODEL.model_id, "weights/b")
    for act in (store.remove, lambda *names: store.set_ttl(*names, None)):
        with pytest.raises(Fault) as fault:
            act(MODEL.model_id, "weights/b")
        assert fault.value.status == 404


@pytest.mark.parametrize(
    "damage",
    [
        {"expires_at": "garbage"},
        {"expires_at": 7},
        {"expires_at": "2030-01-01T00:00:00"},  # without a time zone it cannot be compared
        {"expires_at": ["x"]},
        {"time": None},
        {"time": 5},
        {"size_bytes": "x"},
        {"model": {"model_id": 3, "base_model": "tiny"}},
        {"model": None},
    ],
)
def test_a_damaged_record_takes_its_own_checkpoint_away_and_no_other(tmp_path, caplog, damage):
    store = SavedStates(tmp_path)
    for name in ("a", "b"):
        saved(store, name, ttl_s=3600)
    file = tmp_path / MODEL.model_id / "weights" / "a" / "checkpoint.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    assert [checkpoint.name for checkpoint in store.of(MODEL.model_id)] == ["b"]
    with pytest.raises(Fault, match="there is no such checkpoint"):
        store.find("tinker://ab12:train:0/weights/a")
    assert file.exists() and "is damaged" in caplog.text and str(file) in caplog.text


@pytest.mark.parametrize("damage", [{"last_request": 5}, {"last_request": None}, {"lora_rank": "x"}, {"model_id": []}])
def test_a_damaged_model_is_left_out_of_the_list(tmp_path, caplog, damage):
    store = SavedStates(tmp_path)
    saved(store)
    other = ModelRecord(model_id="cd34:train:0", base_model="tiny", last_request="2026-01-01T00:00:00+00:00")
    store.describe(other)
    file = tmp_path / MODEL.model_id / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    assert store.models() == [other] and store.model(MODEL.model_id) is None
    assert "is damaged" in caplog.text

"""A file of keys with owners, and which keys a server asks for."""

import socket

import pytest

from tests.kit.run_config import run_config
from torchtitan_rl.cli.main import main
from torchtitan_rl.cli.tinker_server import TinkerOptions, adapted, keys_of, serve_tinker
from torchtitan_rl.serve.tinker.owners import EVERYBODY, KeyFile, OneKey, add_key, read_key_file, remove_key


def test_a_key_is_its_owners_and_is_not_in_the_file(tmp_path):
    file = tmp_path / "keys"
    alice, bob, second = add_key(file, "alice"), add_key(file, "bob"), add_key(file, "alice")
    keys = KeyFile(file)
    assert [keys.owner(key) for key in (alice, bob, second)] == ["alice", "bob", "alice"]
    assert [keys.owner(key) for key in ("", "tml-wrong", alice[:-1], alice + "x", "\udcff")] == [None] * 5
    assert alice.startswith("tml-") and len({alice, bob, second}) == 3
    text = file.read_text()
    assert all(key not in text and key.removeprefix("tml-") not in text for key in (alice, bob, second))
    assert len({line.split()[1] for line in text.splitlines()}) == 3, "every key has a salt of its own"


def test_a_server_follows_its_file(tmp_path):
    file = tmp_path / "keys"
    alice = add_key(file, "alice")
    keys = KeyFile(file)
    bob = add_key(file, "bob")
    assert keys.owner(bob) == "bob"
    assert remove_key(file, "alice") == 1
    assert keys.owner(alice) is None and keys.owner(bob) == "bob"
    file.write_text("no line of keys\n")
    assert keys.owner(bob) is None, "a file that cannot be read lets nobody in"
    file.unlink()
    assert keys.owner(bob) is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path, mode):
    file = tmp_path / "keys"
    add_key(file, "alice")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(mode)
    with pytest.raises(ValueError, match="others on this machine may read or write it; chmod 600"):
        KeyFile(file)


def test_what_is_wrong_with_a_file_is_told(tmp_path):
    file = tmp_path / "keys"
    with pytest.raises(ValueError, match="cannot be read.*keys add"):
        KeyFile(file)
    file.write_text("# nobody yet\n")
    file.chmod(0o600)
    with pytest.raises(ValueError, match="has no keys"):
        KeyFile(file)
    add_key(file, "alice")
    file.write_text(file.read_text() + "bob tml-a-key-in-plain-text\n")
    with pytest.raises(ValueError, match="line 2 is not OWNER SALT HASH"):
        read_key_file(file)
    for owner in ("", "..", "a/b", "a b", "x" * 65):
        with pytest.raises(ValueError, match="is not a plain name"):
            add_key(tmp_path / "new", owner)


def test_the_verb_prints_a_key_once_and_lists_owners(tmp_path, capsys):
    file = tmp_path / "keys"
    assert main(["keys", "add", str(file), "alice"]) == 0
    key = capsys.readouterr().out.strip()
    assert KeyFile(file).owner(key) == "alice"
    assert main(["keys", "list", str(file)]) == 0 and capsys.readouterr().out == "alice\n"
    assert main(["keys", "remove", str(file), "bob"]) == 1
    assert "its owners are: alice" in capsys.readouterr().err
    assert main(["keys", "add", str(file)]) == 1 and "keys add takes an owner" in capsys.readouterr().err
    nowhere = tmp_path / "nowhere" / "keys.txt"
    assert main(["keys", "add", str(nowhere), "alice"]) == 1
    assert f"file={str(nowhere)!r}: cannot be written" in capsys.readouterr().err
    assert main(["keys", "remove", str(file), "alice"]) == 0 and read_key_file(file) == []


def test_one_key_is_for_everybody_and_has_to_be_asked_for_beyond_this_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TORCHTITAN_RL_API_KEY", raising=False)
    keys = keys_of(TinkerOptions())
    assert keys.owner("") == keys.owner("tml-anything") == EVERYBODY and "no key" in keys.description()
    assert not keys.needed, "so the server allows this machine's names alone as a Host"
    plain = tmp_path / "plain"
    plain.write_text("tml-one")
    keys = keys_of(TinkerOptions(api_key_file=str(plain)))
    assert "others on this machine may read" in capsys.readouterr().err
    assert keys.needed
    assert keys == OneKey("tml-one") and keys.owner("tml-two") is None and keys.owner("tml-one") == EVERYBODY
    assert "may delete all" in keys.description()
    with pytest.raises(ValueError, match="everybody's models.*--keys FILE.*--shared"):
        keys_of(TinkerOptions(api_key_file=str(plain), host="0.0.0.0"))
    assert keys_of(TinkerOptions(api_key_file=str(plain), host="0.0.0.0", shared=True)) == OneKey("tml-one")
    with pytest.raises(ValueError, match="no API key is given"):
        keys_of(TinkerOptions(host="0.0.0.0", shared=True))
    file = tmp_path / "keys"
    alice = add_key(file, "alice")
    keys = keys_of(TinkerOptions(keys=str(file), host="0.0.0.0"))
    assert keys.needed
    assert keys.owner(alice) == "alice" and keys.owner("") is None and "1 owners" in keys.description()
    for contradiction in ({"shared": True}, {"api_key_file": str(plain)}):
        with pytest.raises(ValueError, match="leave one of them out"):
            keys_of(TinkerOptions(keys=str(file), **contradiction))


@pytest.mark.parametrize("merged", [False, True])
def test_a_server_has_room_for_a_model(merged):
    with pytest.raises(ValueError, match="--max-models=0: must be at least 1"):
        adapted(run_config(), TinkerOptions(max_models=0, merged=merged))


async def test_a_port_that_is_taken_is_refused_before_anything_starts(tmp_path):
    config = run_config()
    config.output_dir = str(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ValueError, match=f"port={taken.getsockname()[1]}"):
            await serve_tinker(config, TinkerOptions(port=taken.getsockname()[1]))
    assert not (tmp_path / "run").exists()

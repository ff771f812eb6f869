"""What the verb `export` refuses before it reads weights."""

import pytest

from torchtitan_rl.cli.main import main
from torchtitan_rl.weights import checkpoint


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "require_complete", lambda path: path)
    monkeypatch.setattr(checkpoint, "problem", lambda path: "")
    monkeypatch.setattr("torchtitan_rl.cli.exit_status.os._exit", _raise)
    file = tmp_path / "p.png"
    file.touch()
    with pytest.raises(SystemExit, match="1"):
        main(["export", str(tmp_path), str(file)])
    assert f"error: directory={str(file)!r}: is a file; give a new directory" in capsys.readouterr().err


def _raise(status):
    raise SystemExit(status)

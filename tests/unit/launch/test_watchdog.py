import json
import subprocess
import sys
import time

import pytest

from torchtitan_rl.launch.liveness import watchdog
from torchtitan_rl.launch.liveness.watchdog import SIGNS_OF_LIFE, SignsOfLife, sign_of_life


def sleeping(file, within_s):
    """A process that promises a sign of life, and gives none."""
    process = subprocess.Popen(["sleep", "60"])
    file.write_text(json.dumps({"pid": process.pid, "within_s": within_s}))
    return process


def test_a_process_without_another_sign_of_life_is_killed(tmp_path, capsys):
    file = tmp_path / "signs"
    process, signs_of_life = sleeping(file, 0.2), SignsOfLife(file)
    signs_of_life.end_if_overdue()
    assert process.poll() is None and file.exists()
    time.sleep(0.25)
    signs_of_life.end_if_overdue()
    assert process.wait(10) == -9 and not file.exists()
    assert "gave no sign of life for 0.2 s (controller.hang_timeout_s) and was killed" in capsys.readouterr().err


def test_a_process_is_killed_also_where_nobody_can_be_told(tmp_path, monkeypatch):
    file = tmp_path / "signs"
    process, signs_of_life = sleeping(file, 0.0), SignsOfLife(file)
    closed = open(tmp_path / "stderr", "w")
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with pytest.raises(ValueError, match="closed file"):
        signs_of_life.end_if_overdue()
    assert process.wait(10) == -9 and not file.exists()


def test_a_jump_of_the_time_of_day_kills_nobody(tmp_path, monkeypatch):
    """A host that was suspended, or whose clock was set: the sign is an hour old by the time of day."""
    file = tmp_path / "signs"
    process, signs_of_life = sleeping(file, 60.0), SignsOfLife(file)
    signs_of_life.end_if_overdue()
    now = time.time()
    monkeypatch.setattr(watchdog.time, "time", lambda: now + 3600)
    signs_of_life.end_if_overdue()
    assert process.poll() is None
    process.kill()
    process.wait(10)


def test_a_new_sign_is_counted_from_when_it_is_seen(tmp_path, monkeypatch):
    file = tmp_path / "signs"
    monkeypatch.setenv(SIGNS_OF_LIFE, str(file))
    process, signs_of_life = sleeping(file, 0.3), SignsOfLife(file)
    for _ in range(3):
        signs_of_life.end_if_overdue()
        time.sleep(0.2)
        sign_of_life(0.3)
        file.write_text(json.dumps({"pid": process.pid, "within_s": 0.3}))
    assert process.poll() is None
    process.kill()
    process.wait(10)

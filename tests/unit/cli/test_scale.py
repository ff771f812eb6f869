"""What `torchtitan-rl scale` refuses, and how it asks a run that goes on."""

import json
import os
import shlex
import socket
import threading
import time
from datetime import datetime

import pytest

from torchtitan_rl.cli.main import main
from torchtitan_rl.record import replica_request
from torchtitan_rl.record.attempts import locked, unlock
from torchtitan_rl.record.run_dir import RunDir


@pytest.fixture
def run(tmp_path):
    """The directory of a run that this process says to go on."""
    status = {"at": datetime.now().astimezone().isoformat(), "heartbeat_s": 5.0, "ended": "", "replicas": {}}
    (tmp_path / "status.json").write_text(json.dumps(status))
    replica_request.open_for(tmp_path, [])
    with locked(RunDir(tmp_path)):
        yield tmp_path
    unlock(RunDir(tmp_path))


def answer_next(run, replicas, problem):
    def watch():
        while not (requests := replica_request.requests_in(run)):
            time.sleep(0.01)
        asked.extend(requests)
        replica_request.answer(run, requests[0], replicas, problem)

    asked: list = []
    threading.Thread(target=watch, daemon=True).start()
    return asked


def test_a_run_is_asked_and_its_answer_printed(run, capsys):
    answer_next(run, 3, "")
    assert main(["scale", str(run), "--replicas", "3"]) == 0
    assert f"{run}: replicas of the generator: 3" in "".join(capsys.readouterr())


def test_what_the_run_refuses_is_an_error(run, capsys):
    answer_next(run, 1, "generator-4: would make 5 generator ranks")
    assert main(["scale", str(run), "--replicas", "9"]) == 1
    assert "error: generator-4: would make 5 generator ranks (the run has 1 now)" in capsys.readouterr().err


def test_a_run_that_does_not_answer_is_not_waited_for_without_an_end(run, capsys):
    assert main(["scale", str(run), "--replicas", "2", "--timeout-s", "0.3"]) == 1
    assert "has not answered for 0.3 s and may do so later" in capsys.readouterr().err


def test_the_command_that_looks_at_a_run_can_be_pasted(run, monkeypatch, capsys):
    directory = run / "it's"
    directory.mkdir()
    monkeypatch.setattr("torchtitan_rl.launch.request.check_going_on", lambda run: None)
    replica_request.open_for(directory, [])
    assert main(["scale", str(directory), "--replicas", "2", "--timeout-s", "0.3"]) == 1
    command = capsys.readouterr().err.split("`")[1]
    assert shlex.split(command) == ["torchtitan-rl", "diagnose", str(directory)]


def test_no_replica_is_refused_before_anybody_is_asked(run, capsys):
    assert main(["scale", str(run), "--replicas", "0"]) == 1
    assert "--replicas=0: a run needs a generator; use at least 1" in capsys.readouterr().err
    assert replica_request.requests_in(run) == []


@pytest.mark.parametrize("wish", ["join", "leave"])
def test_hosts_are_named_by_their_workers(run, capsys, wish):
    asked = answer_next(run, 3, "")
    assert main(["scale", str(run), f"--{wish}", "tcp://10.0.0.5:1,tcp://10.0.0.6:1"]) == 0
    assert getattr(asked[0], wish) == ("tcp://10.0.0.5:1", "tcp://10.0.0.6:1") and asked[0].replicas is None
    assert main(["scale", str(run), f"--{wish}", "10.0.0.5:1"]) == 1
    assert "hosts='10.0.0.5:1': is not the address of a worker; write tcp://HOST:PORT" in capsys.readouterr().err


def test_a_run_that_reads_no_requests_is_not_waited_for(run, capsys):
    replica_request.close(run)
    assert main(["scale", str(run), "--replicas", "2"]) == 1
    assert "reads no requests; it still starts, or evaluates after its last step" in capsys.readouterr().err


def test_what_is_no_run_or_does_not_go_on_is_refused(tmp_path, capsys):
    assert main(["scale", str(tmp_path), "--replicas", "2"]) == 1
    assert "is no directory of a run; name one, such as runs/first" in capsys.readouterr().err
    status = {"at": datetime.now().astimezone().isoformat(), "heartbeat_s": 5.0, "ended": "finished"}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert main(["scale", str(tmp_path), "--replicas", "2"]) == 1
    assert "has finished; name a run that goes on" in capsys.readouterr().err
    for damaged in ("", "[]", '{"ended": '):
        (tmp_path / "status.json").write_text(damaged)
        assert main(["scale", str(tmp_path), "--replicas", "2"]) == 1
        assert f"run={str(tmp_path)!r}: its status.json is damaged; " in capsys.readouterr().err
    (tmp_path / "status.json").write_text(json.dumps(status | {"ended": ""}))
    (tmp_path / "run.lock").write_text(f"pid {os.getpid()} on {socket.gethostname()}")  # nobody holds it
    assert main(["scale", str(tmp_path), "--replicas", "2"]) == 1
    assert "its process is gone; begin again with --resume latest" in capsys.readouterr().err
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.lock", "status.json"]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_a_wait_without_an_end_is_refused(run, capsys, seconds):
    assert main(["scale", str(run), "--replicas", "2", "--timeout-s", seconds]) == 1
    assert f"--timeout-s={seconds}: must be positive and finite" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--join", "--leave"])
def test_no_hosts_are_not_a_request(run, capsys, option):
    with pytest.raises(SystemExit):
        main(["scale", str(run), option, ""])
    assert f"argument {option}: '' names no worker; write tcp://HOST:PORT,..." in capsys.readouterr().err
    assert not replica_request.requests_in(run)

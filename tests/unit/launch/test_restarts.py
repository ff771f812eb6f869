"""The supervisor of a command, with real processes: a config file stands for what the command meets."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.kit.processes import ended

CONFIG = """
import os, signal, time
from pathlib import Path
begun = Path({begun!r})
with begun.open("a") as file:
    file.write(f"{{os.getpid()}}\\n")
number = len(begun.read_text().splitlines())
{body}
"""


def supervised(tmp_path: Path, body: str, *, max_restarts: int, output_dir: str = "") -> psutil.Popen:
    """`train` under a supervisor, of a config file that runs `body`; `number` counts the attempts."""
    config = tmp_path / "config.py"
    config.write_text(CONFIG.format(begun=str(tmp_path / "begun"), body=body))
    program = (
        "import sys; from torchtitan_rl.launch.liveness.restarts import run_with_restarts; "
        f"sys.exit(run_with_restarts('train', [{str(config)!r}], {max_restarts}, {output_dir or str(tmp_path)!r}))"
    )
    return psutil.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


def begun(tmp_path: Path, number: int = 1) -> int:
    """The process id of an attempt, once it has begun."""
    deadline = time.monotonic() + 60
    file = tmp_path / "begun"
    while not file.exists() or len(file.read_text().splitlines()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(file.read_text().splitlines()[number - 1])


def test_an_attempt_that_is_killed_or_fails_begins_again_until_the_restarts_are_used_up(tmp_path):
    process = supervised(tmp_path, "os.kill(os.getpid(), 9) if number == 1 else os._exit(3)", max_restarts=2)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 3 and len((tmp_path / "begun").read_text().splitlines()) == 3
    assert stderr.splitlines() == [
        "warning: an attempt was ended by signal 9; restart 1 of 2 begins",
        "warning: an attempt failed with status 3; restart 2 of 2 begins",
        "error: the last attempt failed with status 3; 2 restarts are used up",
    ]


def test_the_supervisor_opens_no_socket_and_its_end_is_the_commands(tmp_path):
    process = supervised(tmp_path, "time.sleep(120)", max_restarts=3)
    command = begun(tmp_path)
    assert [each for each in (process, psutil.Process(command)) if each.net_connections()] == []
    process.kill(), process.wait()
    deadline = time.monotonic() + 5
    while not ended(command):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_nothing_begins_again(tmp_path, number):
    body = f"signal.signal({int(number)}, lambda *_: os._exit(75)); time.sleep(120)"
    process = supervised(tmp_path, body, max_restarts=3)
    begun(tmp_path)
    time.sleep(0.5)
    process.send_signal(number)
    assert process.wait(20) == 75 and len((tmp_path / "begun").read_text().splitlines()) == 1


def test_a_signal_that_ends_the_command_is_the_status(tmp_path):
    process = supervised(tmp_path, "time.sleep(120)", max_restarts=3)
    begun(tmp_path)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM


def outcome(tmp_path: Path, body: str, *, max_restarts: int) -> list[int]:
    """Status, signal and beginning of the last attempt's lines in `output`, of a config file as in `supervised`."""
    config = tmp_path / "config.py"
    config.write_text(CONFIG.format(begun=str(tmp_path / "begun"), body=body))
    program = (
        "from torchtitan_rl.launch.liveness.restarts import supervised; "
        f"output = open({str(tmp_path / 'output')!r}, 'a'); "
        f"of = supervised('train', [{str(config)!r}], {max_restarts}, {str(tmp_path)!r}, output); "
        "print(of.status, of.asked_by, of.printed_from)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_a_signal_is_known_also_where_the_command_ends_well(tmp_path):
    body = "signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); os.kill(os.getppid(), 15); time.sleep(60)"
    assert outcome(tmp_path, body, max_restarts=3)[:2] == [0, signal.SIGTERM]


def test_where_the_last_attempt_begins_to_print_is_known(tmp_path):
    (tmp_path / "output").write_text("error: of an earlier call\n")
    body = "print('attempt', number, flush=True); os._exit(3)"
    status, _, printed_from = outcome(tmp_path, body, max_restarts=1)
    assert status == 3 and (tmp_path / "output").read_bytes()[printed_from:] == b"attempt 2\n"


@pytest.fixture
def full(tmp_path):
    """A file system of 2 MiB, all of it used."""
    place = tmp_path / "full"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    with pytest.raises(OSError), open(place / "filling", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_command_that_dies_while_the_disk_is_full_does_not_begin_again(tmp_path, full):
    process = supervised(tmp_path, "os.kill(os.getpid(), signal.SIGBUS)", max_restarts=3, output_dir=str(full / "run"))
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGBUS and len((tmp_path / "begun").read_text().splitlines()) == 1
    assert stderr == (
        f"error: an attempt was ended by signal 7, and {full}/run: its file system is full (0 bytes are free); "
        "make room there, then go on with --resume latest\n"
    )

"""A process that begins as a fork behaves as one that was started."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.kit.forks.server import ROOT, SERVERS, forks, in_use
from tests.kit.processes import gone

COMMAND = [sys.executable, "-m", "torchtitan_rl.cli"]


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    """Of a server that no other tests use: its forks are counted."""
    with forks() as variables:
        yield variables


@pytest.fixture(scope="module")
def server(variables) -> psutil.Process:
    return server_of(variables)


def server_of(variables: dict[str, str]) -> psutil.Process:
    return psutil.Process(int(Path(variables[SERVERS], "pid").read_text()))


def forks_of(server: psutil.Process) -> set[psutil.Process]:
    return {fork for kind in server.children() for fork in kind.children()}


def waits(server: psutil.Process, tmp_path: Path) -> tuple[subprocess.Popen, psutil.Process]:
    """A command that serves a page until it is ended, and its fork."""
    (tmp_path / "runs").mkdir(exist_ok=True)
    before = forks_of(server)
    process = subprocess.Popen(
        [*COMMAND, "view", str(tmp_path / "runs"), "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert "http://" in process.stdout.readline()
    of_process = forks_of(server) - before
    if len(of_process) != 1:
        process.kill()
        raise AssertionError(f"{len(of_process)} forks began with the command, not one")
    return process, of_process.pop()


def test_it_prints_and_ends_as_the_command_does(server, variables, tmp_path):
    answers = []
    for used in ({}, variables):
        with in_use(used):
            answers += [
                subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True)
                for words in (["show", "configs/quickstart.py"], ["train", "nowhere.py"])
            ]
    started, forked = answers[:2], answers[2:]
    assert [(a.returncode, a.stdout, a.stderr) for a in started] == [(a.returncode, a.stdout, a.stderr) for a in forked]
    assert started[0].returncode == 0 and started[1].returncode != 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_neither_outlives_the_other(number, server, variables, tmp_path):
    with in_use(variables):
        process, fork = waits(server, tmp_path)
        process.send_signal(number)
        assert gone(fork.pid) and process.wait(5) != 0
        process, fork = waits(server, tmp_path)
        fork.send_signal(number)
        assert process.wait(5) != 0 and gone(fork.pid)


def test_a_process_with_other_variables_that_are_read_at_import_starts_by_itself(server, variables, tmp_path):
    asks = tmp_path / "asks.py"
    asks.write_text("import os, torch\nprint(os.getppid(), torch.get_num_threads())\nraise SystemExit(3)\n")
    with in_use(variables | {"OMP_NUM_THREADS": "1"}):
        before = forks_of(server)
        process = subprocess.Popen([*COMMAND, "train", str(asks)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        out, _ = process.communicate(timeout=60)
    assert out.split()[:2] == [str(os.getpid()), "1"] and forks_of(server) == before


def test_nothing_is_left_of_a_server(tmp_path):
    with forks() as variables:
        server = server_of(variables)
        with in_use(variables):
            process, fork = waits(server, tmp_path)
    assert process.wait(5) != 0 and gone(fork.pid) and not server.is_running()

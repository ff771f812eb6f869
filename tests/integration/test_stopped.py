"""A process of a run that somebody stops (SIGSTOP) makes no run hang: the run ends, or its supervisor begins again.

Run by `pytest -m slow tests/integration/test_stopped.py`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.leftovers import nothing_left
from tests.integration.test_command_line import ROOT, lines
from tests.integration.test_hosts import QUICKSTART, Launch
from torchtitan_rl.record import attempts
from torchtitan_rl.record.run_dir import RunDir

sys.path.insert(0, str(ROOT / "scripts"))
import chaos

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
STEPS = 12
DEADLINE_S = 12.0
HANG_S = 8.0


def _begun(path: Path, *more: str) -> psutil.Popen:
    """A run that has made six steps, of both phases."""
    process = chaos.start(path, STEPS, 0, *more)
    assert chaos.wait_until(lambda: chaos.has_come(path, 6), process), (path.parent / "run.log").read_text()[-500:]
    return process


def test_a_stopped_trainer_ends_the_run_within_the_deadline_of_a_call_and_is_named(tmp_path):
    path = tmp_path / "run"
    with nothing_left(within_s=10):
        process = _begun(path, "--controller.call-timeout-s", str(DEADLINE_S))
        victim = chaos.find("trainer", path, process)
        os.kill(victim, signal.SIGSTOP)
        start = time.monotonic()
        status = process.wait(DEADLINE_S + 20)
        took = time.monotonic() - start
    said = (tmp_path / "run.log").read_text()
    assert status == 1 and f"no answer, policy-0 (pid {victim}) is stopped (SIGSTOP)" in said, said[-500:]
    print(f"the run ended after {took:.1f} s")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_nothing_is_left_however_a_run_ends(tmp_path, number, status):
    path = tmp_path / "run"
    with nothing_left(within_s=10):
        process = _begun(path)
        processes = chaos.everything(process)
        assert len(processes) >= 3  # controller, trainer, generator
        os.kill(process.pid, number)
        assert process.wait(60) == status
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive


def test_nothing_is_left_after_an_error(tmp_path):
    path = tmp_path / "run"
    with nothing_left(within_s=10):
        process = _begun(path)
        processes = chaos.everything(process)
        os.kill(chaos.find("trainer", path, process), signal.SIGKILL)
        assert process.wait(60) == 1
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_torchrun_begins_a_launch_over_hosts_again(tmp_path, number):
    path = tmp_path / "run"
    flags = chaos.command(path, STEPS, 0, "--controller.hang-timeout-s", str(HANG_S), "--max-restarts", "1")
    with nothing_left(within_s=10):
        launch = Launch(tmp_path, *flags[flags.index(QUICKSTART) + 1 :], "--generator.num-replicas", "1")
        try:
            assert chaos.wait_until(lambda: chaos.has_come(path, 6), launch.processes[0]), launch.text()[-1000:]
            os.kill(attempts.attempts(RunDir(path))[-1]["pid"], number)
            assert launch.wait(300) == [0, 0], launch.text()[-1000:]
        finally:
            launch.kill()
    assert len(attempts.attempts(RunDir(path))) == 2
    assert [line["step"] for line in lines(path) if line["phase"] == "reinforcement"] == list(range(1, STEPS + 1))


def test_a_stopped_controller_is_killed_by_its_supervisor_and_the_run_goes_on_to_its_end(tmp_path):
    path = tmp_path / "run"
    with nothing_left(within_s=10):
        process = _begun(path, "--max-restarts", "1", "--controller.hang-timeout-s", str(HANG_S))
        begun = attempts.attempts(RunDir(path))
        os.kill(begun[-1]["pid"], signal.SIGSTOP)
        start = time.monotonic()
        assert chaos.wait_until(lambda: len(attempts.attempts(RunDir(path))) == 2, process)
        took = time.monotonic() - start
        assert process.wait(300) == 0
    assert [line["step"] for line in lines(path) if line["phase"] == "reinforcement"] == list(range(1, STEPS + 1))
    print(f"controller: another attempt began after {took:.1f} s")

"""What a process finds in its environment once the package is imported."""

import os
import subprocess
import sys

import pytest

from torchtitan_rl import environment
from torchtitan_rl.environment import default_environment, seconds_of


def test_the_load_of_a_host_does_not_choose_the_number_of_threads():
    """Whatever the user's shell says, an actor's process does not let libgomp count threads by the load average."""
    ask = "import ctypes, torch; print(ctypes.CDLL('libgomp.so.1').omp_get_dynamic())"
    start = f"import subprocess, sys, torchtitan_rl; subprocess.run([sys.executable, '-c', {ask!r}])"
    answers = [
        subprocess.run([sys.executable, "-c", code], env=os.environ | {"OMP_DYNAMIC": "true"}, capture_output=True)
        for code in (ask, start)
    ]
    assert [answer.stdout.split() for answer in answers] == [[b"1"], [b"0"]], answers[1].stderr


def test_a_gpu_has_the_same_number_for_cuda_as_for_nvml(monkeypatch):
    monkeypatch.setattr(environment, "has_nvidia_driver", lambda: False)
    assert "CUDA_DEVICE_ORDER" not in default_environment()
    monkeypatch.setattr(environment, "has_nvidia_driver", lambda: True)
    assert default_environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "OMP_WAIT_POLICY" not in default_environment()


def test_a_positive_number_of_seconds_is_read_from_a_variable(monkeypatch):
    monkeypatch.delenv("TORCHTITAN_RL_X_S", raising=False)
    assert seconds_of("TORCHTITAN_RL_X_S", 30) == 30
    monkeypatch.setenv("TORCHTITAN_RL_X_S", "0.5")
    assert seconds_of("TORCHTITAN_RL_X_S", 30) == 0.5
    for text in ("5m", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("TORCHTITAN_RL_X_S", text)
        with pytest.raises(SystemExit, match=f"error: TORCHTITAN_RL_X_S='{text}': is not a positive number of seconds"):
            seconds_of("TORCHTITAN_RL_X_S", 30)


def test_the_number_of_spins_takes_some_50_microseconds_whatever_the_processor(monkeypatch):
    monkeypatch.setattr(environment, "has_nvidia_driver", lambda: False)
    assert 1 <= environment.pause_ns() < 1000
    for pause_ns, spins in ((10.0, "5000"), (50.0, "1000")):
        monkeypatch.setattr(environment, "pause_ns", lambda pause_ns=pause_ns: pause_ns)
        assert default_environment()["GOMP_SPINCOUNT"] == spins


def test_a_system_that_lets_no_program_write_code_gets_an_estimate(monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    environment.pause_ns.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(environment.mmap, "mmap", refused)
            assert environment.pause_ns() == 10.0
    finally:
        environment.pause_ns.cache_clear()

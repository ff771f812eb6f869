"""What scripts/setup.sh decides before it downloads anything."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def checked(tmp_path, driver, **environment):
    """`check_driver` of setup.sh, on a machine whose nvidia-smi gives this version."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho {driver}\n")
    smi.chmod(0o755)
    script = (ROOT / "scripts" / "setup.sh").read_text()
    functions = script[script.index("say() {") : script.index("# Everything that decides")]
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", functions + "\ncheck_driver"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment,
        capture_output=True,
        text=True,
        timeout=30,
    )


@pytest.mark.parametrize("driver", ["580.159.04", "595.10", "nothing that is a version"])
def test_a_driver_that_is_new_enough_or_unknown_stops_nothing(tmp_path, driver):
    done = checked(tmp_path, driver)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_old_driver_stops_before_anything_is_downloaded(tmp_path):
    done = checked(tmp_path, "535.104.05")
    assert done.returncode == 1
    assert "driver=535.104.05: CUDA 13.0 needs 580 or newer; update the NVIDIA driver" in done.stderr


def test_whoever_asks_for_cuda_may_set_up_for_another_machine(tmp_path):
    done = checked(tmp_path, "535.104.05", TORCHTITAN_RL_EXTRA="cuda")
    assert done.returncode == 0 and "warning: driver=535.104.05" in done.stderr

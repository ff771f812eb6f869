"""What doctor says of a machine: without a GPU, and with what a stand-in for NVML makes up."""

import sys

import pytest
import torch

from tests.kit.nvml import GIB, fake_nvml, gpu, pretend_cuda_build
from torchtitan_rl.cli import doctor, main
from torchtitan_rl.launch import toolchain


@pytest.fixture
def cuda_build(monkeypatch):
    pretend_cuda_build(monkeypatch)


def said(capsys):
    """(exit status, lines, problems)."""
    status = doctor.report()
    out, err = capsys.readouterr()
    return status, out.splitlines(), [line.removeprefix("problem: ") for line in err.splitlines()]


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CPU build of torch is described")
def test_a_machine_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(toolchain, "c_compiler", lambda: None)  # a CPU needs none
    status, lines, problems = said(capsys)
    assert "compiler    none (Triton compiles C on a GPU)" in lines and "device      cpu" in lines
    assert not [problem for problem in problems if "compiler" in problem or "driver" in problem]


def test_a_gpu_and_its_users(capsys, monkeypatch, cuda_build):
    fake = fake_nvml([gpu(free=20, processes=[(2**22 + 1, 60 * GIB)])])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(toolchain, "missing", lambda: "Python.h: is not there; apt install python3-dev")
    status, lines, problems = said(capsys)
    assert "driver      580.65.06, runs CUDA 13.0; torch is built for 13.0" in lines
    assert "device      0: NVIDIA H100 80GB HBM3, 80.0 GiB, 20.0 free" in lines
    assert f"            in use by pid {2**22 + 1} (another container's): 60.0 GiB" in lines
    assert status == 1 and "Python.h: is not there; apt install python3-dev (this host)" in problems


def test_an_old_driver_and_no_compiler_are_both_said(capsys, monkeypatch, cuda_build):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu()], driver="570.1", cuda=12080))
    monkeypatch.setattr(toolchain, "missing", lambda: "C compiler: there is none; apt install gcc python3-dev")
    _, lines, problems = said(capsys)
    assert "driver      570.1, runs CUDA 12.8; torch is built for 13.0" in lines
    assert [problem.split(":")[0] for problem in problems if "driver" in problem or "compiler" in problem] == [
        "driver=570.1",
        "C compiler",
    ]


def test_no_driver(capsys, monkeypatch, cuda_build):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([], init_error="Driver Not Loaded"))
    status, lines, problems = said(capsys)
    assert status == 1 and "driver      none, runs CUDA none; torch is built for 13.0" in lines
    assert any("no NVIDIA driver answers on this host (Driver Not Loaded)" in problem for problem in problems)


# A dry run judges the config; what is wrong with the machine now it only says.

CONFIG = ["train", "configs/qwen3_4b_gsm8k.py", "--dry-run"]


def test_a_dry_run_refuses_a_gpu_that_is_too_small(capsys, monkeypatch, cuda_build):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu(total=40, free=40)]))
    assert main.main(CONFIG) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "error: gpu=0 (NVIDIA H100 80GB HBM3) of this host: has 40.0 GiB, and policy and generator-0"
    )
    assert len(error.splitlines()) <= 3


def test_a_dry_run_says_what_the_machine_still_needs(capsys, monkeypatch, cuda_build):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu(free=8)], driver="570.1", cuda=12080))
    assert main.main(CONFIG) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "configs/qwen3_4b_gsm8k.py: valid; nothing was started"
    assert [line.split("=")[0] for line in out[1:]] == [
        "still needed: model.assets",
        "still needed: driver",
        "still needed: gpu",
        "still needed: gsm8k.path",  # a dry run downloads nothing
    ]


@pytest.mark.parametrize("config", ["qwen3_0_6b_gsm8k", "qwen3_4b_gsm8k"])
def test_the_configs_for_an_80_gb_card_pass_a_dry_run_on_one(config, capsys, monkeypatch, cuda_build):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml([gpu(total=79, free=79)]))
    assert main.main(["train", f"configs/{config}.py", "--dry-run"]) == 0
    _, missing, data = capsys.readouterr().out.splitlines()
    assert data.startswith("still needed: gsm8k.path=")
    assert missing.startswith("still needed: model.assets='chars': has no safetensors")

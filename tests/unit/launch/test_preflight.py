"""What a run's GPUs are refused for before anything starts: each message, with its numbers."""

import pytest

from tests.kit.nvml import GIB
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.gpus import Cuda, Gpu, GpuUser
from torchtitan_rl.launch.inventory import Host
from torchtitan_rl.launch.preflight import busy_problem, check_hosts, host_problem, memory_problem
from torchtitan_rl.model.memory import gpu_bytes
from torchtitan_rl.tasks.letter_sort import LetterSort

SHAPE = Qwen3Shape(vocab_size=151936, dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, hidden_dim=3072)


def run_config():
    config = RunConfig(name="unit", task=LetterSort.Config(), model=ModelConfig(shape=SHAPE))
    config.generator.kv_cache_gib = 20.0
    return config


def gpu(device="0", total=80, free=None, users=()):
    return Gpu(
        device=device,
        name="NVIDIA H100",
        total_bytes=int(total * GIB),
        free_bytes=int((total if free is None else free) * GIB),
        users=list(users),
    )


def host(*gpus, address="this host", **facts):
    facts = {"driver": "580.65.06", "driver_cuda": "13.0", "num_gpus": len(gpus)} | facts
    cuda = Cuda(torch_version="2.13.0+cu130", torch_cuda="13.0", gpus=list(gpus), **facts)
    return Host(address=address, num_cores=16, devices=[gpu.device for gpu in gpus], cuda=cuda)


def refusal(config, *hosts, **kwargs):
    with pytest.raises(ValueError) as caught:
        check_hosts(config, list(hosts), **kwargs)
    message = str(caught.value)
    assert len(message.splitlines()) == 1 and len(message) < 500
    return message


ON_CPU = (
    "or say that the CPU is meant: TORCHTITAN_RL_EXTRA=cpu bash scripts/setup.sh, and CUDA_VISIBLE_DEVICES= where "
    "there are GPUs to hide"
)


def test_a_gpu_with_room_is_not_refused():
    assert host_problem(host(gpu())) == ""
    check_hosts(run_config(), [host(gpu())])


def test_a_cpu_host_is_asked_nothing():
    cpu = Host(address="this host", num_cores=2)
    assert host_problem(cpu) == memory_problem(run_config(), [cpu]) == busy_problem(run_config(), [cpu]) == ""
    check_hosts(run_config(), [cpu])


def test_a_cuda_build_without_a_driver():
    message = refusal(run_config(), host(error="NVML Shared Library Not Found", driver="", driver_cuda=""))
    assert message == (
        "torch=2.13.0+cu130: is built for CUDA 13.0, and no NVIDIA driver answers on this host (NVML Shared Library "
        f"Not Found); install a driver of version 580 or newer, {ON_CPU}"
    )


def test_a_driver_without_a_gpu():
    assert refusal(run_config(), host()) == (
        "torch=2.13.0+cu130: is built for CUDA 13.0, and this host has a driver (580.65.06) but no GPU; use a host "
        f"with one, {ON_CPU}"
    )


def test_visible_devices_that_name_no_gpu():
    assert refusal(run_config(), host(visible="4", num_gpus=2)) == (
        "CUDA_VISIBLE_DEVICES='4': names none of the 2 GPUs of this host; use numbers below 2 or UUIDs that nvidia-smi "
        "-L prints, or leave it empty to mean the CPU"
    )


@pytest.mark.parametrize(
    ("torch_cuda", "driver", "driver_cuda", "needed"),
    [("13.0", "570.124.06", "12.8", "580"), ("12.6", "470.256.02", "11.4", "525")],
)
def test_a_driver_too_old(torch_cuda, driver, driver_cuda, needed):
    old = host(gpu(), driver=driver, driver_cuda=driver_cuda, address="10.0.0.7")
    old.cuda.torch_cuda = torch_cuda
    assert refusal(run_config(), old) == (
        f"driver={driver}: runs CUDA {driver_cuda} at most, and torch 2.13.0+cu130 on 10.0.0.7 is built for CUDA "
        f"{torch_cuda}; install a driver of version {needed} or newer"
    )


def test_a_newer_minor_version_of_cuda_than_the_driver_s_runs():
    newer = host(gpu(), driver_cuda="13.0")
    newer.cuda.torch_cuda = "13.2"
    assert host_problem(newer) == ""


def test_the_package_that_asks_is_missing():
    message = refusal(run_config(), host(error="the package nvidia-ml-py is not installed", driver="", driver_cuda=""))
    assert message.endswith(
        "the package nvidia-ml-py is not installed on this host, which says what its GPUs are; run scripts/setup.sh"
    )


def test_no_compiler():
    missing = "C compiler: neither gcc nor clang is on PATH; apt install gcc python3-dev"
    assert refusal(run_config(), host(gpu(), missing_toolchain=missing)) == f"{missing} (this host)"


def test_every_host_is_judged():
    config = run_config()
    config.generator.num_replicas = 2
    message = refusal(
        config, host(gpu()), host(error="Driver Not Loaded", driver="", driver_cuda="", address="10.0.0.8")
    )
    assert "no NVIDIA driver answers on 10.0.0.8 (Driver Not Loaded)" in message


def test_a_gpu_too_small_for_what_meets_on_it():
    config = run_config()
    needed = gpu_bytes(config, ["policy", "generator-0"]) / GIB
    message = refusal(config, host(gpu(total=24)))
    assert message.startswith(
        f"gpu=0 (NVIDIA H100) of this host: has 24.0 GiB, and policy and generator-0 would need about {needed:.1f} "
        "(tensors of policy "
    )
    assert message.endswith(
        "); lower trainer.max_tokens_per_microbatch or generator.kv_cache_gib, use "
        "trainer.activation_checkpoint='full', roles.colocation='all' or more GPUs, or start anyway with "
        "TORCHTITAN_RL_MEMORY_CHECK=0"
    )
    alone = gpu_bytes(config, ["generator-0"]) / GIB
    assert alone < 24 < needed
    check_hosts(config, [host(gpu(total=24))], generators_only=True)


def test_each_gpu_is_judged_by_what_is_placed_on_it():
    config = run_config()
    small, large = gpu("1", total=24), gpu("0")
    check_hosts(config, [host(large, small)])  # the policy is first
    message = refusal(config, host(gpu("0", total=22), gpu("1")))
    assert message.startswith("gpu=0 (NVIDIA H100) of this host: has 22.0 GiB, and policy would need")
    assert "generator" not in message[: message.index(";")]


def test_a_gpu_that_others_use():
    config = run_config()
    needed = gpu_bytes(config, ["policy", "generator-0"]) / GIB
    users = [GpuUser(pid=4711, program="python of alice", num_bytes=50 * GIB)]
    assert refusal(config, host(gpu(free=29.5, users=users))) == (
        f"gpu=0 (NVIDIA H100) of this host: 29.5 of 80.0 GiB are free, and policy and generator-0 would need about "
        f"{needed:.1f}; in use by pid 4711 (python of alice, 50.0 GiB); wait for it, end it, choose another GPU with "
        "CUDA_VISIBLE_DEVICES, or start anyway with TORCHTITAN_RL_MEMORY_CHECK=0"
    )
    check_hosts(config, [host(gpu(free=70, users=users))])  # room for both


def test_users_that_nvml_says_little_of():
    config = run_config()
    users = [GpuUser(pid=pid, program="", num_bytes=0) for pid in range(1, 6)]
    assert "in use by pid 1, pid 2, pid 3 and 2 more; wait" in refusal(config, host(gpu(free=1, users=users)))
    assert "NVML names no process that holds the rest" in refusal(config, host(gpu(free=1)))


def test_a_run_that_is_started_anyway(monkeypatch):
    monkeypatch.setenv("TORCHTITAN_RL_MEMORY_CHECK", "0")
    check_hosts(run_config(), [host(gpu(total=24, free=1))])
    assert "no NVIDIA driver" in refusal(run_config(), host(error="Driver Not Loaded"))


def test_what_does_not_fit_for_other_reasons_is_said_first():
    config = run_config()
    config.trainer.parallelism.data_parallel_shard_degree = 4
    assert refusal(config, host(gpu(total=1), gpu("1", total=1))).startswith("policy: needs 4 GPUs on 1 host")

"""Bad configs and layouts, each refused with its reason before a process starts."""

from pathlib import Path

import pytest

from torchtitan_rl.config.load import apply_overrides, load_config
from torchtitan_rl.config.run import EvalSetConfig, RoleConfig
from torchtitan_rl.tasks.dataset import Dataset
from torchtitan_rl.tasks.gsm8k import Gsm8k
from torchtitan_rl.tools.rehearse.hardware import GPUS
from torchtitan_rl.tools.rehearse.process_placement import imagined_hosts
from torchtitan_rl.tools.rehearse.rehearsal import rehearse

ROOT = Path(__file__).parents[4]
DP, TP = "--trainer.parallelism.data-parallel-shard-degree", "--trainer.parallelism.tensor-parallel-degree"
HSDP = "--trainer.parallelism.data-parallel-replicate-degree"


def rehearsed(overrides, *, hosts=1, gpus=8, gib=80.0, cores=64, change=None, check_task=False):
    config = load_config(str(ROOT / "configs/quickstart.py"))
    apply_overrides(config, overrides.split())
    if change is not None:
        change(config)
    machines = imagined_hosts(hosts, gpus, cores, "a GPU", gib)
    return rehearse(config, machines, GPUS["h100"], check_task=check_task)


def a_broken_reward(config):
    config.task.reward = lambda task, completions: [0.5]


def demonstrations_that_are_not_there(config):
    config.supervised.task = Dataset.Config(train="nowhere.jsonl", test="nowhere.jsonl")


def a_cache_for_half_a_sequence(config):
    config.generator.kv_cache_gib = 1e-5


def a_wide_reference(config):
    config.roles.reference, config.roles.colocation = RoleConfig(trainer=config.trainer.of_role()), "policy_reference"
    config.roles.reference.trainer.parallelism.data_parallel_shard_degree = 2
    config.algorithm.kl_coef = 0.1


BAD = {
    "trainer ranks that share no heads": (
        f"{TP} 3",
        {},
        ["tensor_parallel_degree=3", "n_heads=4", "use one of [1, 2]"],
    ),
    "generator ranks that share no KV heads": (
        "--generator.tensor-parallel-degree 4",
        {},
        ["generator.tensor_parallel_degree=4", "n_kv_heads=2"],
    ),
    "context parallelism": (
        "--trainer.parallelism.context-parallel-degree 2",
        {},
        ["context_parallel_degree=2", "is not supported"],
    ),
    "expert parallelism without experts": (
        "--trainer.parallelism.expert-parallel-degree 2",
        {},
        ["expert_parallel_degree=2", "the model has no experts"],
    ),
    "an SPMD backend that gloo does not run": (
        "--trainer.parallelism.spmd-backend full_dtensor",
        {},
        ["spmd_backend='full_dtensor'", "partial_dtensor"],
    ),
    "completions longer than the model": ("--sampling.max-tokens 600", {}, ["max_seq_len=", "lower one of them"]),
    "fewer tokens than sequences in an iteration": (
        "--generator.max-num-batched-tokens 128",
        {},
        ["max_num_batched_tokens=128", "generator.max_num_seqs="],
    ),
    "more hosts than there are": (
        f"{DP} 16 --trainer.num-hosts 2",
        {},
        ["trainer.num_hosts=2", "the launch has 1 host"],
    ),
    "ranks that do not divide over hosts": (
        f"{DP} 9 --trainer.num-hosts 2",
        {"hosts": 2},
        ["trainer.num_hosts=2", "does not divide the mesh's 9 ranks"],
    ),
    "more trainer ranks than GPUs": (
        f"{DP} 16 {HSDP} 2 --trainer.num-hosts 2",
        {"hosts": 2},
        ["policy: needs 16 GPUs on 2 hosts", "8 of 8 on host0, 8 of 8 on host1"],
    ),
    "replicas without GPUs left": (
        f"{DP} 8 --generator.num-replicas 1",
        {},
        ["generator-0: needs 1 GPU", "0 of 8 on host0"],
    ),
    "a replica larger than a host": (
        "--generator.tensor-parallel-degree 2 --trainer.num-hosts 1",
        {"hosts": 2, "gpus": 1},
        ["generator-0: needs 2 GPUs on 1 host"],
    ),
    "a host that would be idle": (f"{DP} 4", {"hosts": 3}, ["hosts=3", "would be idle; raise trainer.num_hosts"]),
    "weights in one host's memory": (
        f"{DP} 16 --trainer.num-hosts 2 --weight-sync.transport shared_memory",
        {"hosts": 3},
        ["weight_sync.transport='shared_memory'", "3 hosts", "use 'auto' or 'store'"],
    ),
    "a reference wider than the devices it shares": (
        "",
        {"change": a_wide_reference},
        ["reference: needs 2 GPUs", "GPUs of policy to share"],
    ),
    "more ranks than cores": (
        "--generator.num-replicas 9",
        {"gpus": 0, "cores": 4},
        ["generator-8", "9 generator ranks", "whose 4 cores carry at most 8"],
    ),
    "more threads than cores": (
        "--trainer.num-threads 65",
        {"gpus": 2},
        ["trainer.num_threads=65", "host0 has 64 cores"],
    ),
    "steps that end within a batch": (
        "--controller.num-steps 101 --algorithm.tasks-per-minibatch 16",
        {},
        ["controller.num_steps=101", "a batch is 2 optimizer steps"],
    ),
    "a cache larger than a GPU": (
        "--generator.kv-cache-gib 90",
        {},
        ["gpu=1 (a GPU) of host0: has 80.0 GiB", "generator-0 would need about 9", "kv_cache_gib"],
    ),
    "a trainer larger than a GPU": (
        "--trainer.max-tokens-per-microbatch 2000000",
        {},
        ["gpu=0 (a GPU) of host0: has 80.0 GiB", "policy would need about", "max_tokens_per_microbatch"],
    ),
    "demonstrations that are not there": (
        "",
        {"change": demonstrations_that_are_not_there, "check_task": True, "gpus": 2},
        ["nowhere.jsonl"],
    ),
    "a cache that holds no sequence": (
        "",
        {"change": a_cache_for_half_a_sequence},
        [
            "generator.kv_cache_gib=1e-05: holds ",
            "and one sequence of generator.max_model_len=64 needs",
            "use at least",
        ],
    ),
    "a reward for one completion only": (
        "",
        {"change": a_broken_reward, "check_task": True, "gpus": 2},
        ["made-up completions"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_config_is_refused_with_the_reason(name):
    overrides, how, reasons = BAD[name]
    refused = rehearsed(overrides, **how).refused
    assert len(refused) == 1
    assert all(reason in refused[0] for reason in reasons), refused


def test_a_good_config_is_not_refused():
    found = rehearsed(f"{DP} 16 --trainer.num-hosts 2 --generator.num-replicas 8", hosts=3, check_task=True)
    assert found.refused == [] and found.times is not None and found.times.total > 0


def test_evaluation_data_that_would_be_downloaded_are_said_to_be_needed(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    def change(config):
        config.controller.eval_sets["math"] = EvalSetConfig(task=Gsm8k.Config(path="nobody/nothing"), num_tasks=4)

    found = rehearsed("", gpus=2, check_task=True, change=change)
    assert found.refused == [] and any("gsm8k.path='nobody/nothing'" in line for line in found.warnings)


def test_weights_that_are_not_there_are_said_to_be_needed():
    found = rehearsed("--model.pretrained True", gpus=2, check_task=True)
    assert found.refused == [] and any("safetensors" in line for line in found.warnings)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 8, 1, "x", 80.0), "--hosts=0"),
        ((1, -1, 1, "x", 80.0), "--gpus-per-host=-1"),
        ((1, 8, 0, "x", 80.0), "--cores-per-host=0"),
        ((1, 8, 1, "x", 0.0), "--gpu-memory-gib=0"),
    ],
)
def test_hosts_that_no_cluster_has(numbers, message):
    with pytest.raises(ValueError, match=message):
        imagined_hosts(*numbers)

"""What a rehearsal says beside what processes hold and hosts send."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.integration.layouts import trainer_config
from tests.integration.trainer_process import Alive
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.model.memory import generator_parts, trainer_parts, working_parts
from torchtitan_rl.tools.rehearse.shards import as_rank, cut_for, mesh_shards
from torchtitan_rl.tools.rehearse.trace_file import _forward

pytestmark = pytest.mark.whole

ROOT = Path(__file__).parents[2]
# 1,000 rows of vocabulary and 256 of a hidden size do not divide by 3.
SHAPE = dict(
    vocab_size=1000, dim=256, n_layers=4, n_heads=8, n_kv_heads=4, head_dim=32, hidden_dim=768, max_seq_len=4096
)
LENGTHS = [100, 90, 80, 130, 112]
LAYOUTS = {
    "FSDP 2": dict(dp=2),
    "FSDP 3": dict(dp=3),
    "TP 2": dict(tp=2),
    "HSDP 2 x 1": dict(replicate=2),
    "FSDP 2, full": dict(dp=2, activation_checkpoint="full"),
    "TP 2, selective": dict(tp=2, activation_checkpoint="selective"),
    "FSDP 2, TP 2": dict(dp=2, tp=2),
}


def spec(layout, num=0, shape=SHAPE, lengths=LENGTHS):
    return json.dumps({"layout": layout, "shape": shape, "lengths": lengths, "num": num})


def trainer(layout):
    config = trainer_config(**layout)
    config.training.seq_len = max(LENGTHS)
    config.max_tokens_per_microbatch = sum(LENGTHS)
    return config


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measured(layout):
    """What every rank of a layout holds, on this machine."""
    size = trainer_config(**layout).num_ranks
    # malloc gives back what is freed, or the peak would be that of an earlier moment.
    settled = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
    together = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **settled}
    command = [sys.executable, "-m", "tests.integration.trainer_process", spec(layout)]
    processes = [
        subprocess.Popen(
            command, env={**os.environ, **together, "RANK": str(rank)}, cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        return [json.loads(process.communicate(timeout=200)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_is_within_a_tenth_of_what_ranks_hold(name):
    config, model = trainer(LAYOUTS[name]), ModelConfig(shape=Qwen3Shape(**SHAPE))
    ranks = measured(LAYOUTS[name])
    shards = mesh_shards(config, model, "policy", "cpu")
    assert sorted(rank for kind in shards.classes for rank in kind.ranks) == list(range(len(ranks)))
    working = trainer_parts(config, model.shape, device="cpu")["working"]
    if config.activation_checkpoint == "selective":  # a CPU's attention is not among what it saves
        working -= 4 * sum(LENGTHS) * SHAPE["n_layers"] * 256 // config.parallelism.tensor_parallel_degree
    for kind in shards.classes:
        for rank in kind.ranks:
            found = ranks[rank]
            print(name, rank, kind.parameters, kind.gradients, kind.optimizer, working, found)
            assert found["model_bytes"] == kind.parameters
            assert found["gradients_bytes"] == kind.gradients
            assert found["optimizer_bytes"] == kind.optimizer
            assert working == pytest.approx(found["working_bytes"], rel=0.1)
            assert working == pytest.approx(found["resident_bytes"], rel=0.1)
            assert working == pytest.approx(found["resident_bytes"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("tie", [True, False])
def test_a_generators_weights_are_those_of_its_model(tie):
    from torchtitan.models.common.config_utils import get_attention_config

    from torchtitan_rl.engine.plan import generator_spec
    from torchtitan_rl.model.spec import build_spec

    shape = Qwen3Shape(**SHAPE, tie_embeddings=tie)
    for tp in (1, 2, 4):
        model = generator_spec(build_spec(ModelConfig(shape=shape)), tp).model
        for layer in model.layers:  # vLLM's has no parameters, and needs an engine
            layer.attention.inner_attention = get_attention_config("varlen")
        with torch.device("meta"):
            built = model.build()
        config = GeneratorConfig(tensor_parallel_degree=tp)
        assert generator_parts(config, shape)["weights"] == 2 * sum(tensor.numel() for tensor in built.parameters())


@pytest.mark.slow
def test_a_thousand_ranks_of_32b_within_a_minute_and_8_gb():
    config = str(ROOT / "configs" / "qwen3_4b_gsm8k.py")
    command = [sys.executable, "-m", "torchtitan_rl.cli", "rehearse", config, *LARGE.split(), "--json"]
    start = time.monotonic()
    process = subprocess.Popen([*command, "--no-reward-check"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    said = json.loads(process.stdout.read())
    _, process.returncode, usage = os.wait4(process.pid, 0)
    seconds, nbytes = time.monotonic() - start, 1024 * usage.ru_maxrss
    print(f"{seconds:.1f} s, {nbytes / 1e9:.2f} GB")
    assert process.returncode == 0 and said["refused"] == [] and said["unknown"] == []
    assert sum(kind["num_ranks"] for kind in said["shards"]["policy"]) == 1024
    assert said["times"]["limit"] and seconds < 60 and nbytes < 8e9


LARGE = """
--hosts 160 --model.flavor 32B --roles.colocation none --algorithm.tasks-per-step 512 --algorithm.group-size 16
--sampling.max-tokens 3072 --generator.max-model-len 4096 --generator.tensor-parallel-degree 8
--generator.num-replicas 32 --trainer.num-hosts 128 --trainer.parallelism.data-parallel-replicate-degree 2
--trainer.parallelism.data-parallel-shard-degree 64 --trainer.parallelism.tensor-parallel-degree 8
"""


@pytest.mark.slow
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_working_memory_of_large_layers_is_within_a_tenth_of_what_torch_would_hold(checkpoint, tie):
    """Layers of the 32B on 512 ranks, with tensors that have no memory."""
    sizes = dict(vocab_size=151936, dim=5120, n_heads=64, n_kv_heads=8, head_dim=128, hidden_dim=25600)
    model = ModelConfig(shape=Qwen3Shape(**sizes, n_layers=3, max_seq_len=8192, tie_embeddings=tie))
    for num_tokens in (512, 8192):
        config = trainer_config(dp=64, tp=8, activation_checkpoint=checkpoint)
        config.training.seq_len = config.max_tokens_per_microbatch = num_tokens
        with as_rank(0, config) as parallel_dims:
            cut = cut_for(config, model, "policy", parallel_dims, "cpu", attention="sdpa").model
            with FakeTensorMode(allow_non_fake_inputs=True):
                cut.to_empty(device="cpu")
                cut.train()
                _forward(cut, num_tokens).sum().backward()
                with Alive([*cut.parameters(), *(tensor.grad for tensor in cut.parameters())]) as alive:
                    _forward(cut, num_tokens).sum().backward()
        said = sum(working_parts(config, model.shape, device="cpu").values())
        if checkpoint == "selective":  # a CPU's attention is not among what it saves
            said -= 3 * num_tokens * 4 * 64 * 128 // 8
        print(checkpoint, tie, num_tokens, said, alive.most, round(said / alive.most, 3))
        assert said == pytest.approx(alive.most, rel=0.1)

"""On a GPU an offload frees the device's memory, which a CPU cannot show. Run: scripts/test.sh -m gpu tests/gpu"""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.actors import TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.dispatch.microbatches import pack
from torchtitan_rl.types import OptimParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rank(tmp_path_factory):
    """One trainer rank of a 100M-parameter model, in this process."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from torchtitan_rl.actors.trainer_rank import TrainerRank
    from torchtitan_rl.weights.store import MemoryStore

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1])
        )
    dist.init_process_group("nccl")
    config = TrainerConfig()
    config.training.mixed_precision_param = "bfloat16"
    shape = Qwen3Shape(vocab_size=4096, dim=768, n_layers=12, n_heads=12, n_kv_heads=4, head_dim=64, hidden_dim=2048)
    yield TrainerRank(
        config,
        ModelConfig(assets="chars", shape=shape),
        "policy",
        0,
        torch.device("cuda", 0),
        MemoryStore(),
        str(tmp_path_factory.mktemp("dump")),
    )
    dist.destroy_process_group()


def test_offloaded_parts_leave_the_device_and_come_back_unchanged(rank):
    batch = pack(random_datums(16, max_len=60))
    rank.forward_backward([batch], importance_sampling, 1.0, 1.0)
    rank.optim_step(OptimParams(lr=1e-4), 1.0)
    rank.forward_backward([batch], importance_sampling, 1.0, 1.0)
    expected = rank.forward([batch], 1.0).rows["policy_logprobs"]
    gradients = rank.gradients()
    held = rank.residency()
    before = torch.cuda.memory_allocated()
    rank.offload(["model", "gradients", "optimizer"])
    freed = before - torch.cuda.memory_allocated()
    assert freed >= 0.95 * sum(held.values()) > 0, f"{freed} of {held} bytes were freed"
    assert rank.residency() == {"model": 0, "gradients": 0, "optimizer": 0}
    with pytest.raises(RuntimeError, match="policy.optim_step: model and optimizer and gradients offloaded"):
        rank.optim_step(OptimParams(), 1.0)
    rank.onload(["model", "gradients", "optimizer"])
    assert rank.residency() == held
    again = rank.forward([batch], 1.0).rows["policy_logprobs"]
    assert all(torch.equal(a, b) for a, b in zip(again, expected))
    assert all(torch.equal(gradients[name], gradient) for name, gradient in rank.gradients().items())
    assert not rank.optim_step(OptimParams(lr=1e-4), 1.0).skipped

"""On a GPU an offload frees the device's memory, which a CPU cannot show. Run: scripts/test.sh -m gpu tests/gpu"""

import pytest
import torch
import torch.distributed as dist

from tests.gpu.agreement import both, check_agreement
from tests.gpu.conftest import ON_CPU, gpu_config
from tests.integration.helpers import flat, random_datums
from torchtitan_rl import platform
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.config.meshes import TrainerConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.dispatch.microbatches import pack
from torchtitan_rl.types import OptimParams

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rank(gpu, tmp_path_factory):
    """One trainer rank of a 100M-parameter model, in this process."""
    from torchtitan_rl.actors.trainer_rank import TrainerRank
    from torchtitan_rl.weights.versioned import MemoryStore

    dist.init_process_group(platform.distributed_backend(), store=dist.HashStore(), rank=0, world_size=1)
    config = TrainerConfig()
    config.training.mixed_precision_param = "bfloat16"
    shape = Qwen3Shape(vocab_size=4096, dim=768, n_layers=12, n_heads=12, n_kv_heads=4, head_dim=64, hidden_dim=2048)
    yield TrainerRank(
        config,
        ModelConfig(assets="chars", shape=shape),
        "policy",
        0,
        platform.local_device(0),
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
    assert ON_CPU or freed >= 0.95 * sum(held.values()) > 0, f"{freed} of {held} bytes were freed"
    assert rank.residency() == {"model": 0, "gradients": 0, "optimizer": 0}
    with pytest.raises(RuntimeError, match="policy.optim_step: model and optimizer and gradients offloaded"):
        rank.optim_step(OptimParams(), 1.0)
    rank.onload(["model", "gradients", "optimizer"])
    assert rank.residency() == held
    again = rank.forward([batch], 1.0).rows["policy_logprobs"]
    assert all(torch.equal(a, b) for a, b in zip(again, expected))  # the same kernels on the same numbers
    assert all(torch.equal(gradients[name], gradient) for name, gradient in rank.gradients().items())
    assert not rank.optim_step(OptimParams(lr=1e-4), 1.0).skipped


def test_roles_that_take_turns_leave_the_device_to_each_other(loop, tmp_path):
    from torchtitan_rl.train.controller import Controller

    async def run():
        async with await Controller.launch(gpu_config(tmp_path / "run", roles__colocation="all")) as controller:
            data, trainer = random_datums(5), controller.trainer
            await trainer.forward_backward(data, importance_sampling)
            (with_gradients,) = await trainer.residency()
            before = await trainer.gradients()
            first = await both(controller)  # the generator wakes, and the trainer comes back to score
            (without,) = await trainer.residency()
            after = await trainer.gradients()
            step = await trainer.optim_step(OptimParams(lr=1e-2))
            await controller.publish()
            return with_gradients, without, before, after, step, first, await both(controller), controller.placement

    with_gradients, without, before, after, step, first, second, placement = loop.run_until_complete(run())
    assert with_gradients["model"] > 0 and with_gradients["gradients"] > 0
    assert without["gradients"] == 0  # scoring needs the model alone
    assert torch.equal(flat(before), flat(after)) and flat(after).norm() > 0
    assert not step.skipped and ("generator", "offload", "kv_cache") in placement.history
    check_agreement(*first)
    check_agreement(*second)

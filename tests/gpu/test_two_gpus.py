"""Two GPUs: layouts of trainer and generator give the numbers of one rank, on NCCL."""

import asyncio

import pytest
import torch

from tests.gpu.agreement import PROMPTS, both, check_agreement, gradient, train
from tests.gpu.conftest import GRADIENT, ON_CPU, UPDATE, gpu_config
from tests.integration.helpers import flat, random_datums, relative_l2
from tests.integration.layouts import client, recorded_batches, replay, trainer_config, trainer_mesh
from tests.integration.test_moe import moe_config
from torchtitan_rl.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

LAYOUTS = {"dp2": dict(dp=2), "tp2": dict(tp=2), "replicate2": dict(replicate=2)}
# float32: NCCL adds up in another order than one rank does, and TF32 would keep 11 bits; ten AdamW updates turn that
# into more, as they do bfloat16's 8 bits.
BOUNDS = {"float32": (1e-3, 2e-2), "bfloat16": (GRADIENT, UPDATE)}
DATA = random_datums(7, max_len=15)


async def numbers(layout, dtype, budget):
    async with trainer_mesh(trainer_config(training__mixed_precision_param=dtype, **layout)) as mesh:
        _, grads = await gradient(client(mesh, budget), [DATA])
        await client(mesh).reset_optimizer()
        update, _ = await replay(client(mesh), recorded_batches(10))
        return grads, flat(update)


@pytest.fixture(scope="module")
def one_rank(loop, two_gpus):
    return {dtype: loop.run_until_complete(numbers({}, dtype, 10**6)) for dtype in BOUNDS}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_updates_are_those_of_one_rank(loop, one_rank, layout, dtype):
    # A budget of 20 tokens gives ranks different numbers of microbatches, and odd ones of tokens.
    grads, update = loop.run_until_complete(numbers(LAYOUTS[layout], dtype, 20))
    expected_grads, expected_update = one_rank[dtype]
    gradient_bound, update_bound = BOUNDS[dtype]
    assert expected_grads.norm() > 0
    assert relative_l2(grads, expected_grads) <= gradient_bound
    assert relative_l2(update, expected_update) <= update_bound


@pytest.mark.parametrize("dp, tp, generator_tp, replicas", [(1, 1, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1)])
def test_trainer_and_generators_agree_whatever_their_layouts(loop, tmp_path, dp, tp, generator_tp, replicas):
    """The first case is one GPU each; in the others generators share the trainer's two."""
    from torchtitan_rl.train.controller import Controller

    async def run():
        config = gpu_config(
            tmp_path / "run",
            trainer__parallelism__data_parallel_shard_degree=dp,
            trainer__parallelism__tensor_parallel_degree=tp,
            generator__tensor_parallel_degree=generator_tp,
            generator__num_replicas=replicas,
            roles__colocation="all" if max(dp, tp) > 1 else "none",
        )
        async with await Controller.launch(config) as controller:
            await train(controller, lr=1e-3)
            await controller.publish()
            compared = await both(controller)
            params = [SamplingParams(max_tokens=8, seed=i) for i in range(16)]
            sampled = await asyncio.gather(
                *(controller.generator.sample(PROMPTS[i % 4], params[i]) for i in range(len(params)))
            )
            return compared, sampled, controller.policy_version

    compared, sampled, version = loop.run_until_complete(run())
    check_agreement(*compared)
    assert all(set(completion.policy_versions) == {version} for completion in sampled)


def test_experts_apart_give_the_gradients_of_experts_together(loop, tmp_path):
    from torchtitan_rl.train.controller import Controller

    async def run(name, **layout):
        config = moe_config(tmp_path / name, **layout)
        config.generator.dtype = config.trainer.training.mixed_precision_param = "bfloat16"
        config.roles.colocation = "all"
        async with await Controller.launch(config) as controller:
            return (await gradient(controller.trainer, [DATA]))[1]

    together = loop.run_until_complete(run("one"))
    apart = loop.run_until_complete(run("two", dp=2, ep=2))
    # A token that a rounded router sends elsewhere changes the gradient of its experts: few of some 50 tokens.
    assert relative_l2(apart, together) <= 0.1


def test_trainer_and_generator_have_a_gpu_each(loop, tmp_path):
    if ON_CPU:
        pytest.skip("asks nvidia-smi")
    from scripts.gpu_checks.device import gpus
    from torchtitan_rl.train.controller import Controller

    def used():
        return torch.tensor([int(gpu["memory.used"]) for gpu in gpus()])

    async def run():
        before = used()
        async with await Controller.launch(gpu_config(tmp_path / "run")):
            return used() - before

    taken = loop.run_until_complete(run())
    assert int((taken > 200).sum()) >= 2, f"MiB taken by GPU: {taken.tolist()}"  # a CUDA context alone is more

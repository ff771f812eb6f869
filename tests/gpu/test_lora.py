"""One GPU: adapters train alone, generators hold the merged model, a checkpoint of adapters is taken up."""

import pytest
import torch

from tests.gpu.agreement import both, check_agreement, train
from tests.gpu.conftest import gpu_config
from torchtitan_rl.actors.operations import GeneratorOperations
from torchtitan_rl.config.meshes import LoRAConfig

pytestmark = pytest.mark.gpu


def split(state):
    adapters = {name: tensor for name, tensor in state.items() if ".lora_" in name}
    return {name: tensor for name, tensor in state.items() if name not in adapters}, adapters


def test_adapters_alone_train_and_generators_get_them_merged(loop, tmp_path):
    from torchtitan_rl.train.controller import Controller

    async def run():
        config = gpu_config(tmp_path / "run", trainer__lora=LoRAConfig(rank=4, alpha=8.0))
        async with await Controller.launch(config) as controller:
            before = await controller.trainer.parameters()
            for seed in range(2):  # after the first only B has moved: A's gradient is a product with B, which was 0
                await train(controller, seed=seed)
            after = await controller.trainer.parameters()
            await controller.publish()
            weights = (await controller.generator._replicas[0].mesh.call_each(GeneratorOperations.weights))[0]
            compared = await both(controller)
            await controller.trainer.save_checkpoint(tmp_path / "saved")
            await train(controller, seed=2)
            await controller.trainer.load_checkpoint(tmp_path / "saved")
            return before, after, weights, compared, await controller.trainer.parameters()

    before, after, weights, compared, loaded = loop.run_until_complete(run())
    (base, adapters), (base_after, adapters_after) = split(before), split(after)
    assert len(adapters) == 4 * 5 * 2 and base.keys() == base_after.keys() == weights.keys()
    assert all(torch.equal(base[name], base_after[name]) for name in base)
    assert not any(torch.equal(adapters[name], adapters_after[name]) for name in adapters)
    name = "layers.2.feed_forward.w2"
    product = adapters_after[f"{name}.lora_b.weight"] @ adapters_after[f"{name}.lora_a.weight"]
    merged = base[f"{name}.weight"] + 2.0 * product
    # Merged in float32 (TF32 at worst, 11 bits) and rounded to bfloat16, 8 bits: up to 2 ** -8 of the largest weight.
    assert (weights[f"{name}.weight"].float() - merged).abs().max() <= 2**-8 * merged.abs().max()
    check_agreement(*compared)
    assert all(torch.equal(loaded[name], after[name]) for name in after)

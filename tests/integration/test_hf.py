"""A Hugging Face directory with weights: what a run exports is what another run starts from, in any layout."""

import torch

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from torchtitan_rl.config.model import ModelConfig


def test_a_run_starts_from_the_weights_of_a_directory(loop, controller, tmp_path):
    from torchtitan_rl.run.controller import Controller

    data = random_datums(3)

    async def run():
        await controller.trainer.save_hf_model(tmp_path / "model", eos=1, pad=0)
        exported, expected = await controller.trainer.parameters(), await controller.trainer.forward(data)
        config = small_config(
            tmp_path / "run",
            model=ModelConfig(assets=str(tmp_path / "model"), pretrained=True),
            trainer__parallelism__data_parallel_shard_degree=2,
        )
        async with await Controller.launch(config) as other:
            return exported, expected, await other.trainer.parameters(), await other.trainer.forward(data)

    exported, expected, loaded, output = loop.run_until_complete(run())
    assert exported.keys() == loaded.keys()
    assert all(torch.equal(exported[name], loaded[name]) for name in exported)
    assert torch.allclose(torch.cat(output.policy_logprobs), torch.cat(expected.policy_logprobs), atol=1e-5)

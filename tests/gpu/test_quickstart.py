"""The quickstart's stack on a GPU: NCCL, variable-length FlashAttention, vLLM's CUDA engine, devices shared or not."""

import asyncio

import pytest
import torch

from tests.integration.conftest import small_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("colocation", ["none", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_steps_agree_with_the_generator(tmp_path, dtype, colocation):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from torchtitan_rl.run.controller import Controller

    config = small_config(tmp_path / "run", generator__dtype=dtype, roles__colocation=colocation)
    config.trainer.training.mixed_precision_param = "bfloat16"  # FlashAttention takes no fp32

    async def run():
        async with await Controller.launch(config) as controller:
            await controller.train()
            return [line for line in controller.run_dir.read_metrics() if line["phase"] == "reinforcement"]

    lines = asyncio.run(run())
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["mismatch/kl"] <= 1e-3 for line in lines)

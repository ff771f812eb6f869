"""The quickstart's run for two steps: devices shared or not, CUDA graphs or not, in both dtypes of the generator."""

import pytest

from tests.gpu.conftest import KL, ON_CPU, gpu_config

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "dtype, colocation, eager", [("float32", "none", True), ("bfloat16", "all", True), ("bfloat16", "none", False)]
)
async def test_two_steps_agree_with_the_generator(tmp_path, dtype, colocation, eager):
    from torchtitan_rl.train.controller import Controller

    config = gpu_config(
        tmp_path / "run",
        generator__dtype=dtype,
        roles__colocation=colocation,
        generator__enforce_eager=eager or ON_CPU,  # there is no graph to capture on a CPU
    )
    async with await Controller.launch(config) as controller:
        await controller.train()
        lines = [line for line in controller.run_dir.read_metrics() if line["phase"] == "reinforcement"]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["mismatch/kl"] <= KL for line in lines)

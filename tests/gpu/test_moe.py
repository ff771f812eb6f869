"""One GPU: a mixture of experts is trained, published and sampled, in both dtypes."""

import pytest
import torch

from tests.gpu.agreement import both, check_agreement, train
from tests.integration.test_moe import moe_config

pytestmark = pytest.mark.gpu

# A router that rounds otherwise sends a token to other experts, which changes its log-probability by more than rounding
# does: most tokens must agree as those of a dense model, the largest difference may be of one that went elsewhere.
BOUNDS = {"bfloat16": dict(largest=0.5, kl=2e-3), "float32": dict(largest=2e-2, kl=1e-4)}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_generator_and_trainer_agree_on_experts(loop, tmp_path, dtype):
    from torchtitan_rl.train.controller import Controller

    async def run():
        config = moe_config(tmp_path / "run")
        config.generator.model_runner = "v1"  # which alone records the experts that `algorithm.expert_routing` replays
        config.generator.dtype = config.trainer.training.mixed_precision_param = dtype
        async with await Controller.launch(config) as controller:
            before = await controller.trainer.parameters()
            await train(controller)
            await controller.publish()
            return before, await controller.trainer.parameters(), await both(controller)

    before, after, compared = loop.run_until_complete(run())
    experts = [name for name in before if ".inner_experts." in name]
    assert len(experts) == 2 * 3 and not any(torch.equal(before[name], after[name]) for name in experts)
    check_agreement(*compared, **BOUNDS[dtype])
    # One step adds 0.01 x the sign of (mean tokens - an expert's tokens), less its mean over the experts.
    for name, bias_E in after.items():
        if name.endswith("expert_bias_E"):
            steps_E = (bias_E - bias_E.min()) / 0.01
            assert bias_E.any() and torch.allclose(steps_E, steps_E.round(), atol=1e-4) and steps_E.max() <= 2.0001

"""Parallel layouts give the numbers of one rank."""

import asyncio

import pytest
import torch

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.types import OptimParams, SamplingParams

PROMPTS = [[20, 31, 27], [22, 40, 21, 14], [30, 35, 36, 39, 14], [25, 26, 27, 28, 29, 30, 14]]


async def _two_steps(config):
    """Log-probabilities after two optimizer steps: the trainer's on recorded data, the generator's on given tokens."""
    from torchtitan_rl.controller import Controller

    async with await Controller.launch(config) as controller:
        data = random_datums(7)
        for _ in range(2):
            await controller.trainer.forward_backward(data, importance_sampling)
            await controller.trainer.optim_step(OptimParams(lr=1e-3))
        await controller.publish()
        output = await controller.trainer.forward(data)
        scored = await asyncio.gather(*(
            controller.generator.score([*d.tokens.tolist(), int(d.target_tokens[-1])]) for d in data))
        sampled = await asyncio.gather(*(
            controller.generator.sample(prompt, SamplingParams(max_tokens=5 + i, seed=i)) for i, prompt in enumerate(PROMPTS)))
        return torch.cat(output.policy_logprobs), torch.cat([torch.tensor(s) for s in scored]), sampled


@pytest.fixture(scope="module")
def reference(loop, tmp_path_factory):
    return loop.run_until_complete(_two_steps(small_config(tmp_path_factory.mktemp("one") / "run")))


@pytest.mark.parametrize("dp, tp", [(2, 1), (1, 2)])
def test_two_steps_give_the_log_probabilities_of_one_rank(loop, reference, tmp_path, dp, tp):
    config = small_config(
        tmp_path / "run", generator__tensor_parallel_degree=2, trainer__parallelism__tensor_parallel_degree=tp,
        trainer__parallelism__data_parallel_shard_degree=dp)
    trained, scored, sampled = loop.run_until_complete(_two_steps(config))
    expected_trained, expected_scored, expected_sampled = reference
    assert (trained - expected_trained).abs().max() <= 1e-4
    assert (scored - expected_scored).abs().max() <= 1e-4
    for completion, expected in zip(sampled, expected_sampled):
        assert completion.tokens == expected.tokens
        assert torch.allclose(torch.tensor(completion.logprobs), torch.tensor(expected.logprobs), atol=1e-4)

"""A process that dies, and two replicas: each needs a stack of its own."""

import asyncio
import os
import signal
import time

import pytest

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.controller import Controller
from torchtitan_rl.types import OptimParams, SamplingParams

PROMPT = [20, 31, 27, 44, 14]


def test_two_replicas_serve_the_same_weights_and_a_dead_process_is_named(loop, tmp_path):
    async def run():
        controller = await Controller.launch(small_config(tmp_path / "run", generator__num_replicas=2))
        try:
            await _replicas_agree(controller)
            await _death_is_named(controller)
        finally:
            await controller.close()

    loop.run_until_complete(run())


async def _replicas_agree(controller):
    await controller.trainer.forward_backward(random_datums(6), cross_entropy)
    await controller.trainer.optim_step(OptimParams(lr=1e-2))
    await controller.publish()
    prompts = [PROMPT[:2] + [20 + i, 14] for i in range(8)]
    first, second = [await asyncio.gather(*(
        controller.generator.sample(prompt, SamplingParams(max_tokens=6, seed=i)) for i, prompt in enumerate(order)))
        for order in (prompts, prompts)]
    assert [c.tokens for c in first] == [c.tokens for c in second]
    loads = [len(share) for _, share in controller.generator._route(
        [(type("R", (), {"tokens": prompt}), None) for prompt in prompts])]
    assert loads == [4, 4]
    tokens = PROMPT + [20, 27, 31, 44, 1]
    scores = [await replica.mesh.call_rank(0, "sample", [_score(tokens)]) for replica in controller.generator._replicas]
    assert scores[0] == scores[1]


def _score(tokens):
    from torchtitan_rl.types import Request

    return Request(tokens, None)


async def _death_is_named(controller):
    victim = controller.generator._replicas[1].mesh
    (pid,) = await victim.call_each("where")
    os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="generator-1-0.where: its process died"):
        await victim.call_rank(0, "where", timeout_s=30)
    assert time.monotonic() - start < 15
    # The others live on.
    await controller.trainer.forward(random_datums(2))
    await controller.generator._replicas[0].mesh.call_rank(0, "where")

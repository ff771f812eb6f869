"""What new weights do to requests that are being answered: `generator.on_update`, in the engine itself."""

import asyncio

import pytest
import torch

from tests.integration.conftest import small_config
from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import OptimParams, SamplingParams

PROMPTS = [[20, 31, 27, 44, 14 + i] for i in range(8)]
LONG = SamplingParams(max_tokens=50, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def local(loop, tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("updates") / "run", generator__on_update="wait")
    controller = loop.run_until_complete(Controller.launch(config, backend="local"))
    yield controller
    loop.run_until_complete(controller.close())


def across_a_pull(loop, local, on_update):
    """Samples while a version is published: the two versions, the completions, one of a request made during the pull,
    and the new version's log-probabilities of all tokens."""
    engine = local.launcher._generators[0].engine
    engine._config.on_update = on_update

    async def run():
        old = await local.publish()
        await local.trainer.forward_backward(random_datums(6, seed=4), cross_entropy)
        await local.trainer.optim_step(OptimParams(lr=3e-3))
        flying = [asyncio.ensure_future(local.generator.sample(prompt, LONG)) for prompt in PROMPTS]
        await asyncio.sleep(0.03)  # the engine has begun
        pull = asyncio.ensure_future(local.publish())
        while not (engine._staged or pull.done()):  # the load follows at once
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.005)
        later = asyncio.ensure_future(local.generator.sample(PROMPTS[0], LONG))
        new, completions = await pull, await asyncio.gather(*flying)
        scores = [await local.generator.score(p + c.tokens) for p, c in zip(PROMPTS, completions)]
        after = [score[len(prompt) - 1 :] for prompt, score in zip(PROMPTS, scores)]
        return old, new, completions, await later, after

    return loop.run_until_complete(run())


def gaps(completions, scores, version):
    """How far the recorded log-probabilities of the tokens of a version are from `scores`."""
    pairs = [
        (logprob, score)
        for completion, of_one in zip(completions, scores)
        for logprob, score, of in zip(completion.logprobs, of_one, completion.policy_versions)
        if of == version
    ]
    return (torch.tensor(pairs)[:, 0] - torch.tensor(pairs)[:, 1]).abs()


def test_requests_that_are_recomputed_go_on_as_if_the_new_weights_had_read_everything(loop, local):
    old, new, completions, _, scores = across_a_pull(loop, local, "recompute")
    assert all(set(completion.policy_versions) == {old, new} for completion in completions)
    assert all(len(completion.tokens) == 50 for completion in completions)
    assert gaps(completions, scores, new).max() < 2e-3  # bfloat16 would not do: the quickstart samples in float32
    assert gaps(completions, scores, old).max() > 0.05


def test_requests_that_wait_end_by_the_old_weights_and_later_ones_begin_by_the_new(loop, local):
    old, new, completions, later, _ = across_a_pull(loop, local, "wait")
    assert all(set(completion.policy_versions) == {old} for completion in completions)
    assert set(later.policy_versions) == {new} and len(later.tokens) == 50


def test_requests_that_keep_their_cache_go_on_with_what_the_old_weights_read(loop, local):
    _, new, completions, _, scores = across_a_pull(loop, local, "keep")
    assert gaps(completions, scores, new).max() > 0.01

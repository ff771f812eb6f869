"""One GPU: weights, versions, transports and numbers of one running stack, and a checkpoint of it."""

import asyncio

import pytest
import torch

from tests.gpu.agreement import PROMPTS, both, check_agreement, gradient, train
from tests.gpu.conftest import GRADIENT, LOGPROB, UPDATE
from tests.integration.helpers import flat, random_datums, relative_l2
from torchtitan_rl.actors.operations import GeneratorOperations, TrainerOperations
from torchtitan_rl.types import OptimParams, SamplingParams

pytestmark = pytest.mark.gpu

TOKENS = PROMPTS[0] + [20, 27, 31, 44, 1]


async def held(controller):
    mesh = controller.generator._replicas[0].mesh
    return (await mesh.call_each(GeneratorOperations.weights))[0]


def test_a_generator_runs_torchtitans_blocks_on_vllms_attention(loop, stack):
    async def ask() -> list:  # a call is submitted when it is made, so it needs the running loop
        return await stack.generator._replicas[0].mesh.call_each(GeneratorOperations.modules)

    (modules,) = loop.run_until_complete(ask())
    assert modules.count("torchtitan.models.qwen3.model.Qwen3TransformerBlock") == 4
    assert sum(m.startswith("vllm.") and m.endswith(".Attention") for m in modules) == 4


@pytest.mark.parametrize("transport", ["shared_memory", "store"])
def test_a_generator_holds_what_was_published_byte_for_byte(loop, stack, transport):
    async def run():
        stack.versions._transport, usual = transport, stack.versions._transport
        try:
            await train(stack, lr=1e-3)
            await stack.publish()
        finally:
            stack.versions._transport = usual
        return await stack.trainer.parameters(), await held(stack)

    published, weights = loop.run_until_complete(run())
    assert published.keys() == weights.keys()
    for name, tensor in published.items():
        assert weights[name].device.type == "cpu" and torch.equal(tensor.to(weights[name].dtype), weights[name]), name


def test_a_step_changes_the_generator_after_a_pull_and_not_before(loop, stack):
    async def run():
        await stack.publish()
        before = await stack.generator.score(TOKENS)
        await train(stack)
        still = await stack.generator.score(TOKENS)
        assert await stack.publish() == stack.policy_version
        return [torch.tensor(s) for s in (before, still, await stack.generator.score(TOKENS))]

    before, still, after = loop.run_until_complete(run())
    # A prompt that is cached is computed in other batches: bfloat16 rounds otherwise, by less than weights change.
    assert (before - still).abs().max() <= LOGPROB / 2 < (before - after).abs().max()


def test_a_pinned_version_is_sampled_and_scored_until_it_is_released(loop, stack):
    async def run():
        old = await stack.publish()
        stack.versions.pin(old, "teacher")
        as_old = await stack.generator.score(TOKENS)
        await train(stack, seed=3)
        new = await stack.publish()
        mixed = await asyncio.gather(
            stack.generator.score(TOKENS, policy_version=old), stack.generator.score(TOKENS, policy_version=new)
        )
        sampled = await stack.generator.sample(PROMPTS[0], SamplingParams(max_tokens=4, seed=0), policy_version=old)
        await stack.generator.score(TOKENS)  # back to the newest
        published = list(stack.versions.holders())
        await stack.versions.release(old, "teacher")
        return old, new, map(torch.tensor, (as_old, *mixed)), sampled, published, list(stack.versions.holders())

    old, new, (as_old, again, as_new), sampled, published, left = loop.run_until_complete(run())
    assert (as_old - again).abs().max() <= LOGPROB / 2 < (as_old - as_new).abs().max()
    assert set(sampled.policy_versions) == {old} and published == [old, new] and left == [new]


def test_tokens_sampled_across_a_pull_carry_both_versions(loop, stack):
    async def run():
        params = SamplingParams(max_tokens=50, ignore_eos=True, seed=0)
        old = await stack.publish()
        flying = [asyncio.ensure_future(stack.generator.sample(PROMPTS[0], params)) for _ in range(32)]
        await train(stack, seed=4, lr=1e-3)
        new = await stack.publish()
        return old, new, await asyncio.gather(*flying)

    old, new, completions = loop.run_until_complete(run())
    for completion in completions:
        assert len(completion.policy_versions) == len(completion.tokens) == 50
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert set(completion.policy_versions) <= {old, new} and completion.policy_versions[0] == old


def test_generator_and_trainer_agree_on_log_probabilities(loop, stack):
    async def run():
        await stack.publish()
        return await both(stack)

    check_agreement(*loop.run_until_complete(run()))


def test_sampling_log_probabilities_are_those_after_temperature(loop, stack):
    from torchtitan_rl.types import Datum

    async def run():
        await stack.publish()
        params = SamplingParams(max_tokens=6, temperature=0.5, seed=1)
        completion = await stack.generator.sample(PROMPTS[1], params)
        tokens = torch.tensor(PROMPTS[1] + completion.tokens)
        datum = Datum(tokens=tokens[:-1], target_tokens=tokens[1:], loss_inputs={})
        output = await stack.trainer.forward([datum], temperature=0.5)
        return torch.tensor(completion.logprobs), output.policy_logprobs[0][len(PROMPTS[1]) - 1 :]

    check_agreement(*loop.run_until_complete(run()), largest=2 * LOGPROB)  # half the temperature doubles differences


def test_the_same_requests_on_empty_caches_give_the_same_tokens(loop, stack):
    async def sample():  # the composition of batches is part of what decides a token's last bits on a GPU
        await stack.publish()
        params = [SamplingParams(max_tokens=8, seed=seed) for seed in range(24)]
        return await asyncio.gather(
            *(stack.generator.sample(PROMPTS[3][: 2 + i % 4], params[i]) for i in range(len(params)))
        )

    first, second = loop.run_until_complete(sample()), loop.run_until_complete(sample())
    assert [c.tokens for c in first] == [c.tokens for c in second]


def test_a_gradient_does_not_depend_on_microbatches_or_calls(loop, stack):
    data = random_datums(13)

    async def run(calls, budget):
        client, usual = stack.trainer, stack.trainer._max_tokens
        client._max_tokens = budget or usual
        try:
            return await gradient(client, calls)
        finally:
            client._max_tokens = usual

    logprobs, expected = loop.run_until_complete(run([data], None))
    assert expected.norm() > 0
    for calls, budget in (([data], 1), ([data], 20), ([data[:5], data[5:]], None), ([[d] for d in data], None)):
        got_logprobs, got = loop.run_until_complete(run(calls, budget))
        assert relative_l2(got, expected) <= GRADIENT
        assert (got_logprobs - logprobs).abs().max() <= LOGPROB


def test_save_load_step_equals_step_step(loop, stack, tmp_path):
    async def run():
        await train(stack, seed=6, lr=1e-3)
        await stack.trainer.save_checkpoint(tmp_path)
        version, saved = stack.policy_version, await stack.trainer.parameters()
        await train(stack, seed=6, lr=1e-3)
        expected = await stack.trainer.parameters()
        await train(stack, seed=7, lr=1e-3)  # somewhere else entirely
        await stack.trainer.load_checkpoint(tmp_path, policy_version=version)
        loaded = await stack.trainer.parameters()
        await train(stack, seed=6, lr=1e-3)
        return saved, loaded, expected, await stack.trainer.parameters()

    saved, loaded, expected, reached = loop.run_until_complete(run())
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert relative_l2(flat(reached) - flat(saved), flat(expected) - flat(saved)) <= UPDATE


def test_a_gradient_that_is_not_finite_is_dropped_and_says_so(loop, stack):
    async def run():
        before = await stack.trainer.parameters()
        broken = lambda inputs: (inputs.policy_logprobs.sum() * float("nan"), {})  # noqa: E731
        await stack.trainer.forward_backward(random_datums(3), broken)
        step = await stack.trainer.optim_step(OptimParams(lr=1e-2))
        return before, step, await stack.trainer.parameters()

    before, step, after = loop.run_until_complete(run())
    assert step.skipped and all(torch.equal(before[name], after[name]) for name in before)


def test_an_export_starts_another_trainer(loop, stack, tmp_path):
    from tests.integration.layouts import trainer_config, trainer_mesh
    from torchtitan_rl.config.model import ModelConfig

    async def run():
        await stack.trainer.save_hf_model(tmp_path / "model", eos=1, pad=0)
        model = ModelConfig(assets=str(tmp_path / "model"), pretrained=True)
        config = trainer_config(training__mixed_precision_param="bfloat16")
        async with trainer_mesh(config, model) as mesh:
            (parameters,) = await mesh.call_each(TrainerOperations.parameters)
        return await stack.trainer.parameters(), parameters

    exported, loaded = loop.run_until_complete(run())
    assert exported.keys() == loaded.keys()
    assert all(torch.equal(exported[name], loaded[name]) for name in exported)

"""Trainer, generator and store together, on one running stack."""

import asyncio
import os
from pathlib import Path

import pytest
import torch

from tests.integration.helpers import flat, random_datums, relative_l2
from tests.integration.layouts import client, trainer_config, trainer_mesh
from torchtitan_rl.actors.operations import GeneratorOperations
from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.losses import cross_entropy, importance_sampling, ppo
from torchtitan_rl.algorithm.minibatch_statistics import clip_cov, kl_cov, top_entropy
from torchtitan_rl.algorithm.terms import with_minibatch_fn
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.record.schedule import engine_files, read_schedule, schedule_of
from torchtitan_rl.train.role_scores import with_old_logprobs
from torchtitan_rl.train.step_metrics import StepMetrics
from torchtitan_rl.types import OptimParams, SamplingParams

PROMPT = [20, 31, 27, 44, 14]


def test_trainer_and_generator_live_in_processes_of_their_own(controller):
    trainer_and_generator = set(controller.launcher.pids)
    assert len(trainer_and_generator) == 2
    assert os.getpid() not in trainer_and_generator


def test_engine_runs_torchtitan_blocks_on_vllm_attention(loop, controller):
    async def run():
        return await controller.generator._replicas[0].mesh.call_each(GeneratorOperations.modules)

    (modules,) = loop.run_until_complete(run())
    assert modules.count("torchtitan.models.qwen3.model.Qwen3TransformerBlock") == 4
    assert modules.count("torchtitan_rl.engine.kernels.KernelAttention") == 4  # a GQAttention
    assert sum(m.startswith("vllm.") and m.endswith(".Attention") for m in modules) == 4
    assert not any("VarlenAttention" in m or "ScaledDotProduct" in m for m in modules)


def test_a_changed_parameter_changes_the_generator_after_a_pull_and_not_before(loop, controller):
    async def run():
        tokens = PROMPT + [20, 27, 31, 44, 1]
        before = await controller.generator.score(tokens)
        trained = controller.trainer.forward_backward(random_datums(6), cross_entropy)
        stepped = controller.trainer.optim_step(OptimParams(lr=1e-2))
        await trained
        version = (await stepped).policy_version
        still = await controller.generator.score(tokens)
        assert await controller.publish() == version == controller.policy_version
        return before, still, await controller.generator.score(tokens)

    before, still, after = loop.run_until_complete(run())
    assert before == still
    assert max(abs(a - b) for a, b in zip(before, after)) > 1e-2


def test_after_a_pull_the_generator_holds_what_the_trainer_published_byte_for_byte(loop, controller):
    async def run():
        await controller.publish()
        mesh = controller.generator._replicas[0].mesh
        return await controller.trainer.parameters(), (await mesh.call_each(GeneratorOperations.weights))[0]

    published, held = loop.run_until_complete(run())
    assert published.keys() == held.keys()
    for name, tensor in published.items():
        assert held[name].dtype == torch.float32 and torch.equal(tensor, held[name]), name


def test_generator_and_trainer_agree_on_log_probabilities(loop, controller):
    async def run():
        groups = await controller.rollouts(controller.draws.next(4))
        from torchtitan_rl.algorithm.datums import to_datums

        data = to_datums(groups, controller.config.algorithm)
        trained = await controller.trainer.forward(data)
        scored = await asyncio.gather(
            *(controller.generator.score([*d.tokens.tolist(), int(d.target_tokens[-1])]) for d in data)
        )
        output = await controller.trainer.forward_backward(data, ppo)
        await controller.trainer.optim_step(OptimParams(lr=0.0))
        return trained, scored, output, data

    trained, scored, output, data = loop.run_until_complete(run())
    for logprobs, score, datum in zip(trained.policy_logprobs, scored, data):
        assert torch.allclose(logprobs, torch.tensor(score), atol=1e-5)
        mask = datum.loss_inputs["loss_mask"] > 0
        assert torch.allclose(logprobs[mask], datum.loss_inputs["sampling_logprobs"][mask], atol=1e-5)
    assert output.metrics["mismatch/kl"] <= 1e-6


def test_sampling_log_probabilities_are_those_after_temperature(loop, controller):
    async def run():
        completion = await controller.generator.sample(PROMPT, SamplingParams(max_tokens=6, temperature=0.5, seed=1))
        from torchtitan_rl.types import Datum

        sequence = torch.tensor(PROMPT + completion.tokens)
        datum = Datum(tokens=sequence[:-1], target_tokens=sequence[1:], loss_inputs={})
        output = await controller.trainer.forward([datum], temperature=0.5)
        return completion, output.policy_logprobs[0][len(PROMPT) - 1 :]

    completion, logprobs = loop.run_until_complete(run())
    assert torch.allclose(torch.tensor(completion.logprobs), logprobs, atol=1e-5)


def test_the_same_requests_give_the_same_tokens_and_bits_whatever_the_cache_holds(loop, controller):
    async def sample():
        return await asyncio.gather(
            *(controller.generator.sample(PROMPT[: 2 + i % 4], SamplingParams(max_tokens=8, seed=i)) for i in range(24))
        )

    first, second = loop.run_until_complete(sample()), loop.run_until_complete(sample())
    assert [c.tokens for c in first] == [c.tokens for c in second]
    assert [c.logprobs for c in first] == [c.logprobs for c in second]


def test_requests_whose_callers_have_gone_leave_the_engine(loop, controller):
    async def run():
        params = SamplingParams(max_tokens=56, ignore_eos=True)
        stays, *gone = [asyncio.ensure_future(controller.generator.sample(PROMPT, params)) for _ in range(8)]
        await asyncio.sleep(0.02)
        for request in gone:
            request.cancel()
        completion = await stays
        async with asyncio.timeout(10):
            while controller.generator.in_flight() != [0]:
                await asyncio.sleep(0.01)
        return completion

    assert len(loop.run_until_complete(run()).tokens) == 56
    (file,) = engine_files(schedule_of(Path(controller.config.output_dir), 1))
    *_, last = (entry for entry in read_schedule(file) if entry.cancelled)
    assert len(last.cancelled) == 7 and last.unfinished == 8


def _gradient(loop, controller, calls, loss_fn=importance_sampling, max_tokens=None):
    async def run():
        client = controller.trainer
        budget, client._max_tokens = client._max_tokens, max_tokens or client._max_tokens
        try:
            outputs = [await client.forward_backward(data, loss_fn) for data in calls]
        finally:
            client._max_tokens = budget
        gradients = await client.gradients()
        await client.optim_step(OptimParams(lr=0.0))
        return outputs, flat(gradients)

    return loop.run_until_complete(run())


def test_a_gradient_does_not_depend_on_microbatches_or_calls(loop, controller):
    data = random_datums(13)
    (whole,), reference = _gradient(loop, controller, [data])
    assert reference.norm() > 0
    for calls, budget in (([data], 1), ([data], 20), ([data[:5], data[5:]], None), ([[d] for d in data], None)):
        outputs, gradient = _gradient(loop, controller, calls, max_tokens=budget)
        assert relative_l2(gradient, reference) <= 1e-5
        logprobs = [row for output in outputs for row in output.policy_logprobs]
        assert [len(row) for row in logprobs] == [len(d) for d in data]
        for row, expected in zip(logprobs, whole.policy_logprobs):
            assert torch.allclose(row, expected, atol=1e-5)


@pytest.mark.parametrize("function", [clip_cov, kl_cov, top_entropy])
def test_a_gradient_by_statistics_of_a_minibatch_does_not_depend_on_microbatches(loop, controller, function):
    """What the rank says of the policy before the step chooses the tokens, by all datums of the step."""
    algorithm = AlgorithmConfig(minibatch_fn=function, minibatch_config={"fraction": 0.3})
    if function is clip_cov:
        algorithm.minibatch_config |= {"low": 0.001}
    data, line = random_datums(13), StepMetrics()
    start = {"batch_logprobs": [datum.loss_inputs["sampling_logprobs"] for datum in data]}

    def gradient(max_tokens):
        client = controller.trainer
        budget, client._max_tokens = client._max_tokens, max_tokens or client._max_tokens
        try:
            entropy = algorithm.minibatch_reads_entropy
            scored = loop.run_until_complete(with_old_logprobs(data, client, line, entropy=entropy))
        finally:
            client._max_tokens = budget
        return _gradient(
            loop, controller, [with_minibatch_fn(with_inputs(scored, **start), algorithm)], max_tokens=max_tokens
        )[1]

    reference = gradient(None)
    assert relative_l2(reference, _gradient(loop, controller, [data])[1]) > 1e-2
    for budget in (1, 20):
        assert relative_l2(gradient(budget), reference) <= 1e-5


def test_loss_weight_and_grad_scale_scale_the_gradient_alike(loop, controller):
    async def norm(loss_weight, grad_scale):
        await controller.trainer.forward_backward(random_datums(5), importance_sampling, loss_weight=loss_weight)
        return (await controller.trainer.optim_step(OptimParams(lr=0.0), grad_scale=grad_scale)).grad_norm

    plain, weighted, scaled = (loop.run_until_complete(norm(*args)) for args in ((1, 1), (0.25, 1), (1, 0.25)))
    assert weighted == pytest.approx(plain / 4, rel=1e-5)
    assert scaled == pytest.approx(plain / 4, rel=1e-5)


def test_masked_tokens_have_exactly_zero_gradient(loop, controller):
    data = random_datums(3)
    for datum in data:
        datum.loss_inputs["loss_mask"].zero_(), datum.loss_inputs["token_weights"].zero_()
    _, gradient = _gradient(loop, controller, [data], ppo)
    assert torch.count_nonzero(gradient) == 0


def test_a_gradient_that_is_not_finite_is_dropped_and_says_so(loop, controller):
    async def run():
        version, before = await controller.publish(), await controller.trainer.parameters()
        await controller.trainer.forward_backward(random_datums(3), cross_entropy, loss_weight=float("nan"))
        output = await controller.trainer.optim_step(OptimParams(lr=1.0))
        return version, before, output, await controller.trainer.parameters()

    version, before, output, after = loop.run_until_complete(run())
    assert output.skipped and output.policy_version == version
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_versions_can_be_pinned_scored_and_are_deleted_when_nobody_holds_them(loop, controller):
    async def run():
        tokens = PROMPT + [20, 27, 31, 44, 1]
        old = await controller.publish()
        controller.versions.pin(old, "teacher")
        as_old = await controller.generator.score(tokens)
        await controller.trainer.forward_backward(random_datums(6, seed=3), cross_entropy)
        await controller.trainer.optim_step(OptimParams(lr=1e-2))
        new = await controller.publish()
        as_new = await controller.generator.score(tokens)
        mixed = await asyncio.gather(
            controller.generator.score(tokens, policy_version=old),
            controller.generator.score(tokens),
            controller.generator.score(tokens, policy_version=new),
        )
        sampled = await controller.generator.sample(PROMPT, SamplingParams(max_tokens=4, seed=0), policy_version=old)
        await controller.generator.score(tokens)  # back to the newest
        published = list(controller.versions.holders())
        await controller.versions.release(old, "teacher")
        with pytest.raises(ValueError, match=f"policy_version={old}: is not published"):
            controller.versions.pin(old, "nobody")
        return old, new, as_old, as_new, mixed, sampled, published, list(controller.versions.holders())

    old, new, as_old, as_new, mixed, sampled, published, left = loop.run_until_complete(run())
    assert new == old + 1
    assert mixed[0] == pytest.approx(as_old, abs=1e-5) and mixed[0] != pytest.approx(as_new, abs=1e-2)
    for scored in mixed[1:]:  # scored in company: docs/numerics.md
        assert scored == pytest.approx(as_new, abs=1e-5)
    assert set(sampled.policy_versions) == {old}
    assert published == [old, new] and left == [new]


def test_tokens_sampled_across_a_pull_carry_both_versions(loop, controller):
    async def run():
        params = SamplingParams(max_tokens=50, ignore_eos=True, seed=0)
        old = await controller.publish()
        flying = [asyncio.ensure_future(controller.generator.sample(PROMPT, params)) for _ in range(32)]
        await controller.trainer.forward_backward(random_datums(6, seed=4), cross_entropy)
        await controller.trainer.optim_step(OptimParams(lr=1e-3))
        new = await controller.publish()
        return old, new, await asyncio.gather(*flying)

    old, new, completions = loop.run_until_complete(run())
    for completion in completions:
        assert len(completion.policy_versions) == len(completion.tokens) == 50
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert set(completion.policy_versions) <= {old, new} and completion.policy_versions[0] == old


@pytest.mark.parametrize("transport", ["store", "shared_memory"])
def test_both_transports_bring_the_same_bytes(loop, controller, transport):
    async def run():
        controller.versions._transport, usual = transport, controller.versions._transport
        try:
            await controller.trainer.forward_backward(random_datums(4, seed=5), cross_entropy)
            await controller.trainer.optim_step(OptimParams(lr=1e-3))
            await controller.publish()
        finally:
            controller.versions._transport = usual
        mesh = controller.generator._replicas[0].mesh
        return await controller.trainer.parameters(), (await mesh.call_each(GeneratorOperations.weights))[0]

    published, held = loop.run_until_complete(run())
    assert all(torch.equal(published[name], held[name]) for name in published)


def test_save_load_step_equals_step_step(loop, controller, tmp_path):
    async def step():
        await controller.trainer.forward_backward(random_datums(6, seed=6), cross_entropy)
        await controller.trainer.optim_step(OptimParams(lr=1e-3))

    async def run():
        await step()
        await controller.trainer.save_checkpoint(tmp_path)
        version = controller.policy_version
        await step()
        expected = await controller.trainer.parameters()
        await step()  # somewhere else entirely
        await controller.trainer.load_checkpoint(tmp_path, policy_version=version)
        await step()
        return expected, await controller.trainer.parameters()

    expected, reached = loop.run_until_complete(run())
    assert all(torch.equal(expected[name], reached[name]) for name in expected)


def test_exported_model_loads_in_transformers_with_the_same_log_probabilities(loop, controller, tmp_path):
    from transformers import AutoModelForCausalLM

    data = random_datums(3, seed=7)

    async def run():
        await controller.trainer.save_hf_model(tmp_path, eos=1, pad=0)
        return await controller.trainer.forward(data)

    output = loop.run_until_complete(run())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for datum, logprobs in zip(data, output.policy_logprobs):
        with torch.no_grad():
            reference = model(datum.tokens[None]).logits[0].log_softmax(-1)
        assert torch.allclose(reference.gather(1, datum.target_tokens[:, None])[:, 0], logprobs, atol=1e-5)


def test_forward_backward_and_optim_step_may_be_submitted_before_either_is_awaited(loop, controller):
    async def run():
        trained = controller.trainer.forward_backward(random_datums(4, seed=8), cross_entropy)
        stepped = controller.trainer.optim_step(OptimParams(lr=0.0))
        again = controller.trainer.optim_step(OptimParams(lr=0.0))
        return (await again).grad_norm, (await stepped).grad_norm, (await trained).loss

    empty, full, loss = loop.run_until_complete(run())
    assert empty == 0.0 and full > 0 and loss > 0
    loop.run_until_complete(controller.publish())


def test_a_call_past_its_deadline_names_the_culprit(loop, controller):
    mesh = controller.generator._replicas[0].mesh

    async def run():
        await mesh.call_rank(0, GeneratorOperations.modules, timeout_s=1e-6)

    with pytest.raises(RuntimeError, match=r"generator-0-0\.modules: no answer within 1e-06 s"):
        loop.run_until_complete(run())


def test_wrong_calls_are_refused_with_the_numbers(loop, controller):
    with pytest.raises(ValueError, match=r"data=\[\]: no datums"):
        controller.trainer.forward_backward([], cross_entropy)
    with pytest.raises(ValueError, match=r"data\[0\]: .* tokens, the trainer's context is .*=64"):
        controller.trainer.forward_backward(random_datums(1, min_len=65, max_len=65), cross_entropy)
    with pytest.raises(ValueError, match=r"prompt of 60 tokens \+ max_tokens=10: exceed generator.max_model_len=64"):
        loop.run_until_complete(controller.generator.sample([5] * 60, SamplingParams(max_tokens=10)))
    with pytest.raises(ValueError, match="policy_version=99: is not published"):
        loop.run_until_complete(controller.generator.score(PROMPT, policy_version=99))


def test_a_loss_that_raises_says_what_it_raised(loop, controller):
    def broken(inputs):
        raise KeyError("no such thing")

    async def run():
        with pytest.raises(RuntimeError, match="policy-0.forward_backward: KeyError: 'no such thing'"):
            await controller.trainer.forward_backward(random_datums(2), broken)
        await controller.trainer.optim_step(OptimParams(lr=0.0))

    loop.run_until_complete(run())


def test_what_is_not_given_to_an_optimizer_step_comes_from_the_config(loop, controller):
    async def run():
        await controller.trainer.optim_step(OptimParams(lr=0.0, betas=(0.1, 0.1)))
        return await controller.trainer.optim_step()

    assert loop.run_until_complete(run()).lr == controller.config.trainer.optimizer.lr == 1e-3


def test_any_loss_gets_the_check_of_generator_against_trainer(loop, controller):
    def reinforce(inputs):
        return -(inputs.token_weights * inputs.policy_logprobs * inputs.advantages).sum(), {}

    outputs, _ = _gradient(loop, controller, [random_datums(4)], reinforce)
    assert {"policy/entropy", "mismatch/kl", "mismatch/logprob_diff_max"} <= outputs[0].metrics.keys()


def test_the_threads_that_train_are_as_nice_as_the_config_says(loop, forked):
    async def niceness():
        async with trainer_mesh(trainer_config(nice=3)) as mesh:
            await client(mesh).forward(random_datums(7))
            (pid,) = mesh.pids
            return [os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]

    own = os.nice(0)
    assert set(loop.run_until_complete(niceness())) == {own, own + 3}  # Monarch's threads, which take calls, and ours

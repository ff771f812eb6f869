"""A workflow that asks for top-p: passed on in evaluations, refused for training before a token is spent."""

import dataclasses

import pytest

from tests.kit.sampler import policy
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.rollout.failures import Failures
from torchtitan_rl.rollout.group import run_group
from torchtitan_rl.rollout.policy import single_turn
from torchtitan_rl.rollout.sampler import AlteredForTraining, SamplingFailed
from torchtitan_rl.types import WITHOUT_ADAPTERS, SamplingParams, Task


async def careful(task, policy, *, rollout_id, seed):
    rollout = await single_turn(task, policy, rollout_id=rollout_id, seed=seed)
    rollout.turns[0].completion = await policy.complete([5, 6], seed=seed, top_p=0.9)
    return rollout


async def only_careful(task, policy, *, rollout_id, seed):
    await policy.complete([5, 6], seed=seed, top_p=0.9)


async def past_the_policy(task, policy, *, rollout_id, seed):
    rollout = await single_turn(task, policy, rollout_id=rollout_id, seed=seed)
    params = SamplingParams(max_tokens=4, seed=seed, top_p=0.9)
    rollout.turns[0].completion = await policy.sampler.sample([5, 6], params)
    return rollout


async def group_of(workflow, made, **named):
    return await run_group(
        workflow,
        Task(id="t", prompt="ab"),
        made,
        1,
        group_id="0/0",
        seed=0,
        reward=lambda task, texts: [1.0 for _ in texts],
        reward_timeout_s=5.0,
        **named,
    )


async def test_in_an_evaluation_it_is_passed_on():
    made = policy("ab", "cd", altered={"min_p": 0.1})
    await group_of(careful, made)
    asked = [(params.top_p, params.min_p) for _, params in made.generator.asked]
    assert asked == [(1.0, 0.1), (0.9, 0.1)]  # the evaluation's own setting, and the workflow's beside it


async def test_for_training_it_is_refused_before_a_token_is_spent():
    made = policy("ab", for_training=True)
    with pytest.raises(AlteredForTraining) as caught:
        await group_of(only_careful, made)
    assert str(caught.value) == (
        "policy.complete(top_p=0.9): this rollout is to train, and its log-probabilities would not be those of the "
        "policy; leave top_p out where policy.for_training is True"
    )
    assert made.generator.asked == []


async def test_past_the_policy_it_is_refused_with_the_same_words_at_the_first_call():
    made = policy("ab", for_training=True)
    with pytest.raises(AlteredForTraining) as caught:
        await group_of(past_the_policy, made)
    assert str(caught.value) == (
        "policy.sampler.sample(top_p=0.9): this rollout is to train, and its log-probabilities would not be those of "
        "the policy; leave top_p out where policy.for_training is True"
    )
    assert [params.top_p for _, params in made.generator.asked] == [1.0]  # the workflow's first turn alone
    evaluated = policy("ab", "cd")
    await group_of(past_the_policy, evaluated)
    assert [params.top_p for _, params in evaluated.generator.asked] == [1.0, 0.9]


async def test_what_does_not_train_may_be_drawn_from_a_copy():
    made = policy("ab", for_training=True)
    helper = dataclasses.replace(made, for_training=False)
    await helper.complete([5], seed=0, top_p=0.9)
    assert [params.top_p for _, params in made.generator.asked] == [0.9]


async def test_no_setting_for_failed_rollouts_hides_the_refusal():
    failures = Failures(AlgorithmConfig(on_rollout_failure="drop_group"), {})
    with pytest.raises(AlteredForTraining):
        await group_of(only_careful, policy(for_training=True), retrying=failures.retrying)
    assert failures.failed.total() == 0


async def test_what_is_off_may_be_said():
    made = policy("ab", for_training=True)
    await made.complete([5], seed=0, top_p=1.0, top_k=0)
    assert len(made.generator.asked) == 1


@pytest.mark.parametrize("asks", ["complete", "sample"])
async def test_the_base_samples_nothing_that_trains(asks):
    made = policy("ab", "cd", for_training=True)
    with pytest.raises(AlteredForTraining, match=f"{asks}.policy_version=-1.: this rollout is to train"):
        if asks == "complete":
            await dataclasses.replace(made, policy_version=WITHOUT_ADAPTERS).complete([5], seed=0)
        else:
            await made.sampler.sample([5], SamplingParams(max_tokens=4), policy_version=WITHOUT_ADAPTERS)
    assert not made.generator.asked
    await made.generator.sample([5], SamplingParams(max_tokens=4), policy_version=WITHOUT_ADAPTERS)  # not a turn


@pytest.mark.parametrize("for_training", [False, True])
async def test_a_fault_of_the_generators_is_none_of_the_workflow(for_training):
    class Gone:
        async def sample(self, tokens, params=None, *, policy_version=None):
            raise RuntimeError("no generator replica is left")

        score = score_top = sample

    sampler = dataclasses.replace(policy(for_training=for_training), generator=Gone()).sampler
    for call in (sampler.sample([5], SamplingParams(max_tokens=1)), sampler.score([5]), sampler.score_top([5], 2)):
        with pytest.raises(SamplingFailed, match="no generator replica is left"):
            await call

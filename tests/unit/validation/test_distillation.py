"""Distillation that is refused before a process starts."""

import functools

import pytest

from torchtitan_rl.algorithm import corrections, losses
from torchtitan_rl.algorithm.advantages import reinforce_pp_baseline
from torchtitan_rl.algorithm.group_estimators import remax
from torchtitan_rl.config.algorithm import AlgorithmConfig, DistillConfig, FilterConfig
from torchtitan_rl.config.load import apply_overrides
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.config.run import RoleConfig, RolesConfig, RunConfig
from torchtitan_rl.rollout.policy import single_turn
from torchtitan_rl.rollout.self_distill import distill_group, postprocess_opsd, self_distill
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.validation.algorithm import check_algorithm
from torchtitan_rl.validation.distillation import check_distill
from torchtitan_rl.validation.fields import check_fields


def check(*roles, distill=None, **algorithm):
    made = RolesConfig(**{role: RoleConfig(model=ModelConfig()) for role in roles})
    config = AlgorithmConfig(distill=DistillConfig(**distill) if distill is not None else None, **algorithm)
    check_fields(config, "algorithm.")
    check_distill(config, made, vocab_size=64)
    check_algorithm(
        RunConfig(
            name="unit",
            task=LetterSort.Config(),
            model=ModelConfig(),
            roles=made,
            algorithm=config,
            generator=GeneratorConfig(),
        )
    )


def hint(rollout):
    return "a:b="


def hint_of_siblings(rollout, siblings):
    return "a:b="


async def hook(group, policy):
    pass


async def hook_for_one(rollout):
    pass


def of_ones_own(data):
    """A `minibatch_fn` that the package does not have."""
    return data


def half(rollout):
    return [0.5] * len(rollout.turns)


OWN = {"workflow": self_distill(single_turn, prompt=hint)}


@pytest.mark.parametrize(
    ("roles", "config"),
    [
        (["teacher"], {"distill": {}}),
        (["teacher"], {"distill": {"discount": 0.9, "rewards": True}}),
        (["teacher", "critic"], {"distill": {"rewards": True}}),
        (["teacher"], {"distill": {"divergence": "top_k"}}),
        (["teacher"], {"distill": {"divergence": "full"}}),
        (
            ["teacher"],
            {"distill": {"divergence": "full"}, "minibatch_fn": of_ones_own, "recompute_logprobs_per_minibatch": True},
        ),
        (
            ["teacher", "reference"],
            {
                "distill": {"divergence": "full"},
                **{"kl_coef": 0.1, "kl_in": "loss", "kl_ratio_weighted": True},
                "recompute_logprobs_per_batch": True,
            },
        ),
        ([], {**OWN, "credit_fn": half}),
        ([], OWN),
        ([], {**OWN, "refresh_teacher_every": 8}),
        ([], {"workflow": self_distill(single_turn, prompt=hint, top_k=4), "loss_fn": losses.cross_entropy}),
        ([], {"after_rewards": hook}),
        ([], {"after_rewards": distill_group(prompt=hint_of_siblings, top_k=4)}),
    ],
)
def test_what_makes_sense_passes(roles, config):
    check(*roles, **config)


@pytest.mark.parametrize(
    ("roles", "config", "words"),
    [
        ([], {"distill": {}}, ["algorithm.distill:", "no teacher", "roles.teacher"]),
        (
            ["teacher"],
            {"distill": {"divergence": "topk"}},
            ["algorithm.distill.divergence='topk'", "did you mean 'top_k'"],
        ),
        (["teacher"], {"distill": {"coef": 0.0}}, ["algorithm.distill.coef=0.0", "must be positive; use 1"]),
        (
            ["teacher"],
            {"distill": {"discount": 1.5}},
            ["algorithm.distill.discount=1.5", "must be between 0 and 1; use 0 for none"],
        ),
        (["teacher"], {"distill": {"discount": 0.5, "divergence": "full"}}, ["discount=0.5", "no effect"]),
        (["teacher"], {"distill": {"divergence": "top_k", "top_k": 65}}, ["top_k=65", "64 tokens"]),
        (["teacher"], {"distill": {}, **OWN}, ["one teacher"]),
        (["teacher", "critic"], {"distill": {}}, ["roles.critic", "rewards=True"]),
        (
            ["teacher"],
            {"distill": {"divergence": "full"}, "recompute_logprobs_per_batch": True},
            ["recompute_logprobs_per_batch=True has no ratio to serve"],
        ),
        (
            [],
            {"workflow": self_distill(single_turn, prompt=hint, top_k=4), "credit_fn": half},
            ["credit_fn", "top_k of self-distillation", "last_branch"],
        ),
        ([], {**OWN, "advantage_fn": remax, "greedy_baseline": True}, ["greedy_baseline=True", "in self-distillation"]),
        (["teacher"], {"distill": {}, "filters": FilterConfig(zero_variance=True)}, ["zero_variance"]),
        (
            ["teacher"],
            {
                "distill": {"divergence": "full"},
                "correction_fn": corrections.truncated_token,
                "recompute_logprobs_per_minibatch": True,
            },
            ["correction_fn", "rewards=True"],
        ),
        (["teacher", "reference"], {"distill": {"divergence": "top_k"}, "kl_coef": 0.1, "kl_in": "reward"}, ["kl_in"]),
        (
            ["teacher", "reference"],
            {"distill": {"rewards": True}, "kl_coef": 0.1, "kl_in": "return", "kl_estimator": "k1"},
            ["kl_in='return'", "are no rewards of theirs; use 'reward' or 'loss'"],
        ),
        (["teacher"], {"distill": {}, "whiten_advantages": True}, ["whiten_advantages=True", "use False"]),
        (
            ["teacher"],
            {"distill": {}, "loss_fn": losses.cross_entropy},
            ["does not read advantages", "importance_sampling"],
        ),
        (
            ["teacher"],
            {"distill": {"divergence": "full", "rewards": True}, "loss_fn": losses.cross_entropy},
            ["does not read advantages", "rewards=True"],
        ),
        (["teacher"], {"distill": {"coef": "1"}}, ["algorithm.distill.coef='1'", "write coef=1.0, without quotes"]),
        (["teacher"], {"distill": {}, "precomputed_advantages": "require"}, ["'require'"]),
        (["teacher"], {"distill": {}, "filters": FilterConfig(overlong="penalty")}, ["penalty"]),
        (["teacher"], {"distill": {"divergence": "full"}, "loss_config": {"clip_low": 0.1}}, ["loss_config"]),
        (
            ["teacher"],
            {"distill": {"divergence": "top_k"}, "recompute_logprobs_per_batch": True},
            ["recompute_logprobs_per_batch"],
        ),
        ([], {**OWN, "loss_fn": losses.cross_entropy}, ["does not read advantages", "self-distillation"]),
        ([], {"workflow": self_distill(single_turn, prompt=hint, top_k=65)}, ["top_k=65", "64 tokens"]),
        ([], {**OWN, "after_rewards": distill_group(prompt=hint_of_siblings)}, ["keep one"]),
        (["critic"], OWN, ["roles.critic"]),
        ([], {**OWN, "filters": FilterConfig(zero_variance=True)}, ["zero_variance"]),
        ([], {**OWN, "filters": FilterConfig(overlong="penalty")}, ["penalty"]),
        ([], {"refresh_teacher_every": 4}, ["refresh_teacher_every=4", "self_distill"]),
        ([], {**OWN, "refresh_teacher_every": -1}, ["refresh_teacher_every=-1"]),
        ([], {**OWN, "temperature": 0.7}, ["temperature=0.7", "use 1"]),
        ([], {**OWN, "precomputed_advantages": "ignore"}, ["'ignore'", "would not count"]),
        ([], {"after_rewards": hint_of_siblings}, ["not an async function"]),
        ([], {"after_rewards": "sdpo"}, ["'sdpo'", "not an async function"]),
    ],
)
def test_what_contradicts_itself_is_refused(roles, config, words):
    with pytest.raises(ValueError) as caught:
        check(*roles, **config)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"prompt": hint_of_siblings}, ["cannot be called as (rollout)"]),
        ({"prompt": hint, "coef": 0}, ["coef=0"]),
        ({"prompt": hint, "discount": -0.1}, ["discount=-0.1"]),
        ({"prompt": hint, "top_k": -1}, ["top_k=-1"]),
        ({"prompt": hint, "top_k": 4, "discount": 0.5}, ["no effect"]),
        ({"prompt": hook_for_one}, ["is async"]),
    ],
)
def test_the_decorator_looks_at_its_arguments(settings, words):
    with pytest.raises(ValueError) as caught:
        self_distill(**settings)
    assert all(word in str(caught.value) for word in words), caught.value
    assert postprocess_opsd is self_distill


@pytest.mark.parametrize("advantage_fn", ["grpo", reinforce_pp_baseline])
def test_a_group_is_weighed_by_an_estimator_of_one_group(advantage_fn):
    with pytest.raises(ValueError, match="advantage_fn=.*not an estimator of one group"):
        distill_group(prompt=hint_of_siblings, advantage_fn=advantage_fn)


def test_what_is_wrapped_around_a_teacher_does_not_hide_it():
    @functools.wraps(OWN["workflow"])
    async def wrapped(task, policy, *, rollout_id, seed):
        return await OWN["workflow"](task, policy, rollout_id=rollout_id, seed=seed)

    for workflow in (OWN["workflow"], wrapped, functools.partial(OWN["workflow"]), functools.partial(wrapped)):
        assert AlgorithmConfig(workflow=workflow).own_teachers == [OWN["workflow"]]
    assert not AlgorithmConfig(workflow=single_turn, after_rewards=hook).asks_teacher


def test_a_config_is_recorded_with_the_teachers_settings():
    config = RunConfig(name="unit", task=LetterSort.Config(), model=ModelConfig(), algorithm=AlgorithmConfig(**OWN))
    recorded = resolved(config)["algorithm"]["workflow"]
    assert recorded["coef"] == 1.0 and recorded["prompt"]["function"].endswith(":hint")
    assert recorded["workflow"]["function"].endswith("single_turn")
    apply_overrides(config, ["--algorithm.workflow.coef", "0.5"])
    assert config.algorithm.workflow.coef == 0.5
    OWN["workflow"].coef = 1.0

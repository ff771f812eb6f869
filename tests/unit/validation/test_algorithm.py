"""Algorithms that are refused before a process starts, and the message that says why."""

import dataclasses
import functools
import math

import pytest
import torch

from tests.kit.refusal import refusal
from torchtitan_rl.algorithm import corrections, credit, losses, reductions
from torchtitan_rl.algorithm.advantages import group_estimator, grpo, pass_at_k, reinforce, reinforce_pp_baseline, rloo
from torchtitan_rl.algorithm.group_estimators import length_discounted, length_rewarded, opo, remax
from torchtitan_rl.algorithm.inputs import without_inputs
from torchtitan_rl.algorithm.minibatch_statistics import clip_cov, kl_cov, top_entropy
from torchtitan_rl.config.algorithm import AlgorithmConfig, EntropyControlConfig, ScheduleConfig
from torchtitan_rl.config.meshes import GeneratorConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.config.run import RoleConfig, RolesConfig, RunConfig
from torchtitan_rl.tasks.letter_sort import LetterSort
from torchtitan_rl.validation.algorithm import check_algorithm, check_entropy_control
from torchtitan_rl.validation.fields import check_fields
from torchtitan_rl.validation.functions import probe_loss


def run(*, roles=(), schedule=None, **algorithm):
    return RunConfig(
        name="unit",
        task=LetterSort.Config(),
        model=ModelConfig(),
        generator=GeneratorConfig(),
        roles=RolesConfig(**{role: RoleConfig() for role in roles}),
        algorithm=AlgorithmConfig(**algorithm, **({"schedule": schedule} if schedule else {})),
    )


def check(config):
    check_fields(config)
    check_algorithm(config)


def refused(**config):
    return refusal(check, run(**config))


MINIBATCH = {"recompute_logprobs_per_minibatch": True}


def drops_a_column(data):
    return without_inputs(data, "advantages")


ADAPTIVE = {"kl_target": 6.0, "kl_coef": 0.1, "kl_in": "return", "kl_estimator": "k1", "roles": ("reference",)}


@pytest.mark.parametrize(
    "config",
    [
        {},
        ADAPTIVE,
        MINIBATCH | {"minibatch_fn": clip_cov, "minibatch_config": {"fraction": 0.002, "seed": 3}},
        MINIBATCH | {"minibatch_fn": functools.partial(top_entropy, fraction=0.3)},
        MINIBATCH | {"minibatch_fn": kl_cov, "num_epochs": 2, "loss_fn": losses.importance_sampling},
        MINIBATCH | {"minibatch_fn": kl_cov, "tasks_per_minibatch": 8},
        ADAPTIVE | {"kl_in": "reward", "kl_horizon": 128},
        {"advantage_fn": rloo, "loss_fn": losses.gspo, "reduction": reductions.sequence_mean},
        {"advantage_fn": functools.partial(grpo, std="unbiased"), "loss_fn": losses.cispo},
        {"advantage_fn": reinforce_pp_baseline, "loss_fn": losses.dro, "loss_config": {"beta": 0.2}},
        {"advantage_fn": {"solver": grpo, "judge": reinforce}, "loss_fn": losses.importance_sampling},
        {"reduction": functools.partial(reductions.constant_length, length=64)},
        {"loss_fn": losses.cross_entropy},
        {
            "group_size": 1,
            "advantage_fn": reinforce,
            "roles": ("critic",),
            "critic_loss_config": {"clip": 0.2},
            "gae_lambda": 0.95,
        },
        {"kl_coef": 0.1, "roles": ("reference",)},
        {"kl_coef": 0.1, "kl_ratio_weighted": True, "roles": ("reference",)},
        {"kl_coef": 0.1, "kl_ratio_weighted": True, "kl_estimator": "k1", "roles": ("reference",)},
        {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1", "roles": ("reference",)},
        {"kl_coef": 0.1, "kl_in": "return", "kl_estimator": "k1", "gae_gamma": 0.99, "roles": ("reference",)},
        {"kl_coef": 0.1, "kl_in": "return", "kl_estimator": "k1", "gae_lambda": 0.9, "roles": ("reference", "critic")},
        *(
            {"correction_fn": getattr(corrections, name), "recompute_logprobs_per_minibatch": True}
            for name in corrections.__all__
            if name not in ("both", "opsm")
        ),
        {"correction_fn": corrections.opsm, "correction_config": {"delta": 0.1}},
        {
            "correction_fn": functools.partial(
                corrections.both,
                first=corrections.truncated_token,
                second=functools.partial(corrections.opsm, delta=0.1),
            ),
            "recompute_logprobs_per_batch": True,
        },
        {
            "correction_fn": corrections.reject_outlier,
            "recompute_logprobs_per_batch": True,
            "correction_denominator": "kept",
        },
        {"correction_fn": corrections.truncated_token, "recompute_logprobs_per_batch": True},
        {
            "correction_fn": corrections.masked_sequence,
            "recompute_logprobs_per_minibatch": True,
            "correction_denominator": "kept",
        },
        {"loss_config": {"dual_clip": 3.0}, "entropy_coef": 0.01},
        {"whiten_advantages": True, "roles": ("critic",), "gae_lambda": 0.95},
    ],
)
def test_what_is_in_the_library_passes(config):
    check(run(**config))


def corrects_by_the_policy(inputs):
    return (inputs.policy_logprobs.detach() > -1.2).float(), {}


def mean_loss(inputs):
    return -(inputs.policy_logprobs * inputs.advantages).mean(), {}


def mean_by_tokens(inputs):
    return -(inputs.token_weights * inputs.policy_logprobs * inputs.advantages).sum() / inputs.loss_mask.sum(), {}


def mean_with_the_value_zero(inputs):
    change_T = inputs.policy_logprobs - inputs.policy_logprobs.detach()
    return -(inputs.token_weights * change_T * inputs.advantages).sum() / inputs.num_datums, {}


def unweighted(inputs):
    return -(inputs.loss_mask * inputs.policy_logprobs * inputs.advantages).sum(), {}


def twice_weighted(inputs):
    return -(inputs.token_weights.square() * inputs.policy_logprobs).sum(), {}


def trains_the_prompt(inputs):
    return -((inputs.token_weights + 1) * inputs.policy_logprobs).sum(), {}


def only_a_loss(inputs):
    return -(inputs.token_weights * inputs.policy_logprobs).sum()


def per_token(inputs):
    return -inputs.token_weights * inputs.policy_logprobs, {}


def detached(inputs):
    return (inputs.token_weights * inputs.policy_logprobs.detach()).sum(), {}


def not_finite(inputs):
    return (inputs.token_weights * inputs.policy_logprobs / 0.0).sum(), {}


def other_arguments(logprobs, advantages):
    return -(logprobs * advantages).sum(), {}


def misspelt(inputs):
    return -(inputs.token_weights * inputs.policy_logprobs * inputs.advantage).sum(), {}


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (mean_by_tokens, "which is no token sum; return (inputs.token_weights * per_token).sum()"),
        (mean_loss, "which is no token sum"),
        (mean_with_the_value_zero, "which is no token sum"),  # its gradient says so
        (unweighted, "with doubled weights, so the reduction would not count"),
        (twice_weighted, "with doubled weights, so the reduction would not count"),
        (trains_the_prompt, "where loss_mask and weights are 0"),
        (only_a_loss, "returned a tensor of shape (); return (loss, metric sums)"),
        (per_token, "returned a tuple of a tensor of shape (5,), a dict; return (loss, metric sums)"),
        (detached, "has no gradient by inputs.policy_logprobs, so nothing would train"),
        (not_finite, "on a few ordinary tokens; return a finite one"),
        (other_arguments, "raised TypeError: other_arguments() missing 1 required positional argument: 'advantages'"),
        (misspelt, "raised AttributeError: loss input 'advantage': the data carry only"),
    ],
)
def test_a_loss_that_is_not_one(loss_fn, message):
    said = refused(loss_fn=loss_fn)
    place = f"test_algorithm.py:{loss_fn.__code__.co_firstlineno}"
    assert said.startswith(f"algorithm.loss_fn={__name__}:{loss_fn.__name__} ({place}): ") and message in said, said


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"clip": 1.0}, "returned a metric named 'clip'; name it area/what"),
        ({3: 1.0}, "returned a metric named 3"),
        ({"reward/mean": 1.0}, "returned 'reward/mean', which is a metric of every run; give it another name"),
        ({"mine/ratio": torch.zeros(5)}, "returned a tensor of shape (5,) as 'mine/ratio'; return its sum"),
        ({"mine/word": "high"}, "returned a str as 'mine/word'"),
    ],
)
def test_metrics_of_a_loss_that_no_line_can_hold(metrics, message):
    def with_metrics(inputs):
        return losses.ppo(inputs)[0], metrics

    assert message in refused(loss_fn=with_metrics)


def test_a_loss_input_the_run_does_not_have():
    def to_reference(inputs):
        return (inputs.token_weights * (inputs.policy_logprobs - inputs.reference_logprobs).square()).sum(), {}

    assert "loss input 'reference_logprobs'" in refused(loss_fn=to_reference)
    check_algorithm(run(loss_fn=to_reference, roles=("reference",)))


def test_losses_of_the_kl_to_a_teacher_are_probed_by_it_too():
    def probe(loss_fn):
        probe_loss(
            "algorithm.loss_fn=it",
            loss_fn,
            {},
            outputs=["policy_logprobs", "teacher_kl"],
            columns={"token_weights", "loss_mask", "advantages", "sampling_logprobs"},
        )

    def both(inputs):
        return losses.ppo(inputs)[0] + 0.1 * losses.reverse_kl(inputs)[0], {}

    def mean_kl(inputs):
        return losses.ppo(inputs)[0] + inputs.teacher_kl.mean(), {}

    def trains_the_prompts_kl(inputs):
        return losses.ppo(inputs)[0] + ((inputs.token_weights + 1) * inputs.teacher_kl).sum(), {}

    for loss_fn in (losses.reverse_kl, both, losses.ppo):
        probe(loss_fn)
    for loss_fn, message in (
        (mean_kl, "where loss_mask and weights are 0"),
        (trains_the_prompts_kl, "where loss_mask and weights are 0"),
        (detached, "has no gradient by inputs.policy_logprobs or inputs.teacher_kl"),
    ):
        with pytest.raises(ValueError, match=message):
            probe(loss_fn)
    assert "teacher_kl=None: the data carry no teacher_hidden" in refused(loss_fn=losses.reverse_kl)


def test_a_critics_loss_is_probed_too():
    def mean_square(inputs):
        return (inputs.predicted_values - inputs.returns).square().mean(), {}

    assert refused(critic_loss_fn=mean_square, roles=("critic",)).startswith("algorithm.critic_loss_fn=")


@pytest.mark.parametrize(
    ("loss_fn", "config", "message"),
    [
        (
            losses.ppo,
            {"clip_hihg": 0.3},
            "algorithm.loss_config.clip_hihg=0.3: torchtitan_rl.algorithm.surrogate:ppo has no such argument; did you "
            "mean clip_high?",
        ),
        (losses.cross_entropy, {"clip_high": 0.3}, "it takes none"),
        (losses.ppo, {"clip_low": -0.5, "clip_high": 0.2}, "algorithm.loss_config.clip_low=-0.5: the bounds"),
        (losses.ppo, {"dual_clip": 0.9}, "algorithm.loss_config.dual_clip=0.9: must be above 1"),
        (losses.dro, {"beta": math.inf}, "algorithm.loss_config.beta=inf: must be positive"),
        (losses.sapo, {"tau_neg": 0.0}, "algorithm.loss_config.tau_neg=0.0: must be positive and finite"),
        (losses.gmpo, {"log_clip_high": -0.4}, "algorithm.loss_config.log_clip_high=-0.4: must not be negative"),
        (losses.gmpo, {"clip_high": 0.4}, "gmpo has no such argument; did you mean log_clip_high?"),
        (losses.dppo_tv, {"delta_high": -0.2}, "algorithm.loss_config.delta_high=-0.2: must not be negative"),
        (losses.dppo_kl, {"cap": 0.5}, "algorithm.loss_config.cap=0.5: must be above 1"),
        (losses.vespo, {"lambda_pos": 0.0}, "algorithm.loss_config.lambda_pos=0.0: must be positive and finite"),
    ],
)
def test_arguments_of_a_loss(loss_fn, config, message):
    assert message in refused(loss_fn=loss_fn, loss_config=config)


def too_few(rewards_G):
    return rewards_G[1:]


def divides_by_zero(rewards_G):
    return (rewards_G - rewards_G.mean()) / rewards_G.std()


def two_arguments(rewards_G, groups):
    return rewards_G


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (too_few, "algorithm.advantage_fn=too_few: gave "),
        (divides_by_zero, "algorithm.advantage_fn=divides_by_zero: gave [nan, nan, nan, nan, nan, nan, nan, nan]"),
        (two_arguments, "algorithm.advantage_fn: raised TypeError: two_arguments() missing 1 required"),
        (functools.partial(grpo, std="unbiasd"), "std='unbiasd': is not a kind of standard deviation"),
        ({"solver": grpo, "judge": too_few}, "algorithm.advantage_fn=too_few: gave "),
        (
            "grop",
            "algorithm.advantage_fn='grop': is not a function; give the function itself, not its name; did you mean "
            "the function torchtitan_rl.algorithm.advantages.grpo?",
        ),
        ({"solver": "rlo"}, "algorithm.advantage_fn.solver='rlo': is not a function"),
    ],
)
def test_an_estimator_that_is_not_one(estimator, message):
    assert message in refused(advantage_fn=estimator)


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (
            functools.partial(pass_at_k, k=8),
            "algorithm.advantage_fn=pass_at_k(k=8): compares subsets of 8 rollouts, and algorithm.group_size=8 has at "
            "most one; use a smaller k, or larger groups",
        ),
        (
            {"solver": grpo, "judge": functools.partial(pass_at_k, k=9)},
            "algorithm.advantage_fn.judge=pass_at_k(k=9): compares subsets of 9 rollouts",
        ),
        (functools.partial(pass_at_k, k=0), "k=0: is no number of rollouts"),
        (
            pass_at_k,
            "algorithm.advantage_fn=pass_at_k: says not how many rollouts a subset has; write "
            "partial(advantages.pass_at_k, k=4)",
        ),
    ],
)
def test_subsets_that_a_group_does_not_have(estimator, message):
    assert message in refused(advantage_fn=estimator)
    check(run(advantage_fn=functools.partial(pass_at_k, k=7)))
    hook = lambda rollouts, config: []  # noqa: E731  # groups of any size
    check(run(advantage_fn=functools.partial(pass_at_k, k=9), trajectory_grouping_hook=hook))


@group_estimator
def asks_for_a_part(group):
    return group.part("exact") - group.lengths_G.mean() + len(group.rollouts[0].turns)


@group_estimator
def takes_it_for_rewards(group):
    return group - group.mean()


def test_a_greedy_baseline_and_the_estimator_that_reads_it_come_together():
    check(run(advantage_fn=remax, greedy_baseline=True, group_size=1))
    assert refused(advantage_fn=remax).startswith(
        "algorithm.greedy_baseline: rollout probe/0/0 has no greedy one beside it; set it to True, let a hook keep"
    )
    assert refused(greedy_baseline=True) == (
        "algorithm.greedy_baseline=True: plays a rollout of every task for a baseline, and no estimator that sees "
        "groups would read it; use advantage_fn=group_estimators.remax, or False"
    )
    for without in ({"roles": ("critic",)}, {"precomputed_advantages": "require"}):
        assert "whose advantages do not count with a critic" in refused(
            advantage_fn=remax, greedy_baseline=True, **without
        )


def test_an_estimator_of_groups_is_tried_with_lengths_and_any_part():
    check(run(advantage_fn=asks_for_a_part))
    check(run(advantage_fn={"solver": opo, "judge": asks_for_a_part}))
    check(run(advantage_fn=functools.partial(length_rewarded, weight=0.5)))
    check(run(advantage_fn=functools.partial(length_discounted, alpha=0.1, estimator=grpo)))
    assert refused(advantage_fn=functools.partial(length_rewarded, weight=-1.0)) == (
        "algorithm.advantage_fn: weight=-1.0: is no weight of a length reward; use a number above 0, such as 0.5"
    )
    said = refused(advantage_fn=takes_it_for_rewards)
    assert said.startswith("algorithm.advantage_fn: raised AttributeError: 'JudgedGroup' object has no attribute")


@group_estimator
def less_for_slow_ones(group):
    slowest_G = torch.tensor([max(turn.seconds[1] for turn in rollout.turns) for rollout in group.rollouts])
    return group.rewards_G - 0.1 * slowest_G


@group_estimator
def reads_the_answer(group):
    return torch.tensor([float(len(rollout.task.answer)) for rollout in group.rollouts])


def halves_where_a_turn_is_paid(rollout):
    return [0.5 if turn.reward > 0 else 1.0 for turn in rollout.turns]


def test_made_up_rollouts_have_what_played_ones_have_and_a_message_says_what_they_lack():
    check(run(advantage_fn=less_for_slow_ones, credit_fn=halves_where_a_turn_is_paid))
    message = refused(advantage_fn=reads_the_answer)
    assert "on groups of made-up rollouts (task.answer=None, text=''" in message and "tokens" not in message
    message = refused(credit_fn=lambda rollout: [len(rollout.task.answer)] * len(rollout.turns))
    assert "on made-up rollouts (task.answer=None, text=''" in message
    assert "on made-up rewards of groups; mend it" in refused(advantage_fn=two_arguments)


def halves(rollout):
    return [0.5] * len(rollout.turns)


@pytest.mark.parametrize("credit_fn", [credit.all_branches, credit.last_branch, halves])
def test_a_credit_function_passes(credit_fn):
    check(run(credit_fn=credit_fn))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"credit_fn": "last_branches"}, "did you mean the function torchtitan_rl.algorithm.credit.last_branch?"),
        ({"credit_fn": lambda rollout: [1.0]}, "returned [1.0] for the 3 turns of rollout probe/branches/0; return a"),
        ({"credit_fn": lambda rollout: rollout.turns[1]}, "raised IndexError"),
        (
            {"credit_fn": halves, "roles": ("critic",)},
            "halves: with roles.critic what a token counts is computed after it",
        ),
        ({"credit_fn": halves} | ADAPTIVE, "with algorithm.kl_in='return' what a token counts is computed"),
    ],
)
def test_a_credit_function_that_is_not_one_or_would_not_count(config, message):
    assert message in refused(**config)


@pytest.mark.parametrize(
    ("reduction", "message"),
    [
        (lambda masks, groups: masks[:1], "returned a list of a tensor of shape (3,) for masks of 3, 1 and 2 tokens"),
        (
            lambda masks, groups: [mask + 1 for mask in masks],
            "gave weights [1.0, 2.0, 2.0] for the mask [0.0, 1.0, 1.0]",
        ),
        (
            lambda masks, groups: [mask / mask.sum() for mask in masks],
            "gave weights [nan, nan] for the mask [0.0, 0.0]",
        ),
        (
            reductions.constant_length,
            "raised TypeError: constant_length() missing 1 required keyword-only argument: 'length'",
        ),
        ("token_meen", "did you mean the function torchtitan_rl.algorithm.reductions.token_mean?"),
    ],
)
def test_a_reduction_that_is_not_one(reduction, message):
    assert message in refused(reduction=reduction)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"kl_coef": 0.1},
            "algorithm.kl_coef=0.1: there is no reference to measure the KL to; set roles.reference or use 0",
        ),
        ({"kl_coef": -0.1}, "algorithm.kl_coef=-0.1: must not be negative; use 0 for none"),
        ({"entropy_coef": math.nan}, "algorithm.entropy_coef=nan: must be finite and not negative; use 0 for none"),
        ({"kl_estimator": "k33"}, "algorithm.kl_estimator='k33': there is no such choice; did you mean 'k3'?"),
        ({"kl_in": "rewards"}, "algorithm.kl_in='rewards': there is no such choice; did you mean 'reward'?"),
        (
            {"kl_coef": 0.1, "kl_estimator": "k1", "roles": ("reference",)},
            "algorithm.kl_estimator='k1': its gradient as a loss",
        ),
        (
            {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k2", "roles": ("reference",)},
            "algorithm.kl_estimator='k2': as a reward its policy gradient is not that of the KL",
        ),
        (
            {"kl_coef": 0.1, "kl_in": "reward", "roles": ("reference",)},
            "algorithm.kl_estimator='k3': as a reward its policy gradient is not that of the KL",
        ),
        (
            {"kl_ratio_weighted": True},
            "algorithm.kl_ratio_weighted=True: there is no KL to weigh; set algorithm.kl_coef, or use False",
        ),
        (
            {"kl_coef": 0.1, "kl_in": "return", "kl_estimator": "k2", "roles": ("reference",)},
            "use 'k1' with algorithm.kl_in='return', or 'loss'",
        ),
        (
            {
                "kl_coef": 0.1,
                "kl_ratio_weighted": True,
                "kl_in": "reward",
                "kl_estimator": "k1",
                "roles": ("reference",),
            },
            "algorithm.kl_ratio_weighted=True: a KL in the reward is a part of the advantage",
        ),
        (
            {"kl_coef": 0.1, "kl_ratio_weighted": True, "kl_estimator": "k2", "roles": ("reference",)},
            "algorithm.kl_ratio_weighted=True: the mean of algorithm.kl_estimator='k2' is not the KL",
        ),
        (
            {
                "kl_coef": 0.1,
                "kl_in": "return",
                "kl_estimator": "k1",
                "loss_fn": losses.cross_entropy,
                "roles": ("reference",),
            },
            "algorithm.kl_in='return': torchtitan_rl.algorithm.losses:cross_entropy does not read advantages",
        ),
        (
            {"kl_target": 6.0},
            "algorithm.kl_target=6.0: there is no coefficient to adapt, and 0 stays 0; set algorithm.kl_coef to the "
            "first one, with roles.reference, or use 0",
        ),
        ({"kl_target": 6.0, "kl_coef": 0.1}, "algorithm.kl_coef=0.1: there is no reference to measure the KL to"),
        (
            {"kl_target": 6.0, "kl_coef": 0.1, "roles": ("reference",)},
            "algorithm.kl_target=6.0: adapts the coefficient of a KL in rewards, and algorithm.kl_in='loss' is a term "
            "of the loss; use 'return' or 'reward', or kl_target=0",
        ),
        (
            ADAPTIVE | {"kl_horizon": 127},
            "algorithm.kl_horizon=127: a batch has 128 rollouts, so one batch would change the coefficient by more "
            "than a fifth; use 128 or more",
        ),
        (
            {"kl_horizon": 500},
            "algorithm.kl_horizon=500: without a target no coefficient adapts; set algorithm.kl_target or use 10000",
        ),
        ({"kl_target": -1.0}, "algorithm.kl_target=-1.0: must not be negative; use 0 for a coefficient that stays"),
        ({"kl_horizon": 0}, "algorithm.kl_horizon=0: must be"),
        (
            {"whiten_advantages": True, "loss_fn": losses.cross_entropy},
            "algorithm.loss_fn=torchtitan_rl.algorithm.losses:cross_entropy: does not read advantages, by which "
            "algorithm.whiten_advantages=True is to train; use importance_sampling or ppo",
        ),
        ({"kl_in": "return", "gae_gamma": 0.9}, "algorithm.gae_gamma=0.9: is for a critic and this run has none"),
        (
            {"kl_coef": 0.1, "kl_in": "return", "kl_estimator": "k1", "gae_lambda": 0.9, "roles": ("reference",)},
            "algorithm.gae_lambda=0.9: is for a critic and this run has none",
        ),
        (
            {
                "kl_coef": 0.1,
                "kl_in": "reward",
                "kl_estimator": "k1",
                "loss_fn": losses.cross_entropy,
                "roles": ("reference",),
            },
            "algorithm.kl_in='reward': torchtitan_rl.algorithm.losses:cross_entropy does not read advantages",
        ),
        (
            {"correction_fn": corrections.masked_token},
            "are against the generator already, nothing is left to correct; set "
            "algorithm.recompute_logprobs_per_batch=True",
        ),
        (
            {
                "correction_fn": functools.partial(
                    corrections.both, first=corrections.reject_token, second=corrections.reject_outlier
                )
            },
            "are against the generator already, nothing is left to correct",
        ),
        (
            {"correction_fn": corrections.opsm},
            "raised TypeError: opsm() missing 1 required keyword-only argument: 'delta'",
        ),
        (
            {"correction_fn": corrections.opsm, "correction_config": {"delta": -1.0}},
            "algorithm.correction_config.delta=-1.0: must be finite and not negative",
        ),
        (
            {"correction_fn": corrections.opsm, "correction_config": {"delta": 0.1}, "correction_denominator": "kept"},
            "algorithm.correction_denominator='kept': opsm compares with the policy of each step",
        ),
        (
            {
                "correction_fn": corrections.reject_geometric,
                "correction_config": {"low": 1.01},
                "recompute_logprobs_per_batch": True,
            },
            "algorithm.correction_config.low=1.01: the bounds 1.01 and 1.01 of a weight cross",
        ),
        (
            {
                "correction_fn": functools.partial(
                    corrections.both,
                    first=corrections.truncated_token,
                    second=functools.partial(corrections.reject_outlier, low=2.0),
                ),
                "recompute_logprobs_per_batch": True,
            },
            "low=2.0: a weight of 1, where trainer and generator agree, is outside [2, 100]",
        ),
        (
            {"minibatch_config": {"fraction": 0.1}},
            "algorithm.minibatch_config={'fraction': 0.1}: there is no function for it to configure; set",
        ),
        (
            {"minibatch_fn": clip_cov},
            "minibatch_statistics:clip_cov: sees the policy's log-probabilities just before each step, and this run "
            "does not compute them; set algorithm.recompute_logprobs_per_minibatch=True",
        ),
        (
            {"minibatch_fn": clip_cov, "recompute_logprobs_per_batch": True},
            "set algorithm.recompute_logprobs_per_minibatch=True",
        ),
        (
            MINIBATCH | {"minibatch_fn": "clip_cov"},
            "did you mean the function torchtitan_rl.algorithm.minibatch_statistics.clip_cov?",
        ),
        (
            MINIBATCH | {"minibatch_fn": clip_cov, "minibatch_config": {"fractoin": 0.1}},
            "minibatch_statistics:clip_cov has no such argument; did you mean fraction?",
        ),
        (
            MINIBATCH | {"minibatch_fn": clip_cov, "minibatch_config": {"fraction": 2.0}},
            "algorithm.minibatch_config.fraction=2.0: must be above 0 and at most 1",
        ),
        (
            MINIBATCH | {"minibatch_fn": clip_cov, "minibatch_config": {"low": 7.0}},
            "algorithm.minibatch_config.low=7.0: is not below high=5.0",
        ),
        (
            MINIBATCH | {"minibatch_fn": kl_cov, "tasks_per_minibatch": 16},
            "minibatch_statistics:kl_cov: compares with the policy before the batch, and a batch has one step, before "
            "which the two are the same; set algorithm.tasks_per_minibatch or algorithm.num_epochs",
        ),
        (
            MINIBATCH | {"minibatch_fn": kl_cov, "num_epochs": 2, "minibatch_config": {"coef": 0.0}},
            "algorithm.minibatch_config.coef=0.0: must be positive and finite",
        ),
        (
            MINIBATCH | {"minibatch_fn": kl_cov, "num_epochs": 2, "loss_fn": losses.cross_entropy},
            "cross_entropy: does not read advantages, by which algorithm.minibatch_fn is to train",
        ),
        (
            MINIBATCH | {"minibatch_fn": top_entropy, "minibatch_config": {"fraction": 0.0}},
            "algorithm.minibatch_config.fraction=0.0: must be above 0 and at most 1",
        ),
        (
            MINIBATCH | {"minibatch_fn": drops_a_column},
            "algorithm.minibatch_fn: took advantages off datum 0; return every column",
        ),
        (
            {"correction_denominator": "kept"},
            "algorithm.correction_denominator='kept': there is no correction that rejects tokens; set",
        ),
        (
            {"correction_denominator": "keep"},
            "algorithm.correction_denominator='keep': there is no such choice; did you mean 'kept'?",
        ),
        (
            {
                "correction_denominator": "kept",
                "correction_fn": corrections.truncated_token,
                "recompute_logprobs_per_batch": True,
            },
            "truncated_token rejects no token, so nothing would leave the denominator; use masked_token",
        ),
        (
            {
                "correction_denominator": "kept",
                "correction_fn": functools.partial(corrections.truncated_token, cap=3.0),
                "recompute_logprobs_per_batch": True,
            },
            "truncated_token rejects no token, so nothing would leave the denominator; use masked_token",
        ),
        (
            {"correction_denominator": "kept", "correction_fn": corrections.masked_token},
            "are against the generator already, nothing is left to correct",
        ),
        (
            {
                "correction_denominator": "kept",
                "correction_fn": corrects_by_the_policy,
                "recompute_logprobs_per_batch": True,
            },
            "without the model's outputs, which depend on the microbatch: raised ",
        ),
        (
            {"recompute_logprobs_per_batch": True, "recompute_logprobs_per_minibatch": True},
            "algorithm.recompute_logprobs_per_batch=True: ",
        ),
        (
            {"correction_config": {"cap": 2.0}},
            "algorithm.correction_config={'cap': 2.0}: there is no correction for it",
        ),
        (
            {
                "correction_fn": corrections.truncated_token,
                "correction_config": {"caps": 2.0},
                "recompute_logprobs_per_minibatch": True,
            },
            "algorithm.correction_config.caps=2.0: ",
        ),
        (
            {
                "correction_fn": corrections.masked_token,
                "correction_config": {"low": 5.0, "high": 0.5},
                "recompute_logprobs_per_minibatch": True,
            },
            "algorithm.correction_config.low=5.0: the bounds 5 and 0.5",
        ),
        (
            {"correction_fn": lambda inputs: inputs.old_logprobs, "recompute_logprobs_per_minibatch": True},
            "returned a tensor of shape (5,); return (factor_T, metric sums)",
        ),
        (
            {"correction_fn": lambda inputs: (inputs.old_logprobs, {}), "recompute_logprobs_per_minibatch": True},
            "return finite ones that are not negative",
        ),
        ({"gae_lambda": 0.9}, "algorithm.gae_lambda=0.9: is for a critic and this run has none"),
        ({"critic_loss_config": {"clip": 0.2}}, "algorithm.critic_loss_config={'clip': 0.2}: is for a critic"),
        ({"gae_gamma": 1.5, "roles": ("critic",)}, "algorithm.gae_gamma=1.5: must be between 0 and 1"),
        (
            {"schedule": ScheduleConfig(decay="cosin")},
            "algorithm.schedule.decay='cosin': there is no such choice; did you mean 'cosine'",
        ),
        ({"schedule": ScheduleConfig(warmup_steps=-1)}, "algorithm.schedule.warmup_steps=-1: must not be negative"),
        (
            {"schedule": ScheduleConfig(warmup_ratio=1.5)},
            "algorithm.schedule.warmup_ratio=1.5: must be between 0 and 1; use a part of all steps",
        ),
        (
            {"schedule": ScheduleConfig(warmup_ratio=0.5, warmup_steps=3)},
            "warmup_steps=3 says how long the warm-up is already",
        ),
        (
            {"schedule": ScheduleConfig(final_factor=-1.0)},
            "algorithm.schedule.final_factor=-1.0: must not be negative; use 0 to end at 0",
        ),
        (
            {"schedule": ScheduleConfig(final_factor=math.inf)},
            "algorithm.schedule.final_factor=inf: must be finite and not negative; use 0 to end at 0",
        ),
        (
            {"on_rollout_failure": "ignore"},
            "algorithm.on_rollout_failure='ignore': there is no such choice; use one of 'fail', 'retry', 'drop_group'",
        ),
        (
            {"on_rollout_failure": "retry", "rollout_retries": 0},
            "algorithm.rollout_retries=0: retries nothing; use 1 or more, or on_rollout_failure='drop_group'",
        ),
        ({"max_failed_frac": 0.0}, "algorithm.max_failed_frac=0.0: must be above 0 and at most 1; use 1 for no limit"),
    ],
)
def test_contradictions_and_terms_without_effect(config, message):
    assert message in refused(**config)


CONTROLLED = AlgorithmConfig(entropy_coef=0.001, entropy_control=EntropyControlConfig(target=0.3))


@pytest.mark.parametrize(
    ("coef", "control", "message"),
    [
        (
            0.001,
            {"min_coef": 0.005},
            "algorithm.entropy_control.min_coef=0.005: is not below max_coef=0.005, so the coefficient could not move; "
            "use a smaller one, or algorithm.entropy_control=None with algorithm.entropy_coef=0.005",
        ),
        (
            0.01,
            {},
            "algorithm.entropy_coef=0.01: is the first coefficient, and outside of the bounds [0.0, 0.005] of "
            "algorithm.entropy_control; use a number within them, such as 0.0",
        ),
        (0.0, {"min_coef": 0.001}, "algorithm.entropy_coef=0.0: is the first coefficient, and outside of the bounds"),
        (
            0.001,
            {"step": 0.006},
            "algorithm.entropy_control.step=0.006: is more than the 0.005 between min_coef and max_coef, so a batch",
        ),
        (
            0.001,
            {"target": 4.3},
            "algorithm.entropy_control.target=4.3: no distribution over the vocabulary's 67 tokens has more than 4.205 "
            "nats, so the coefficient could only rise; use an entropy that the policy has early in training",
        ),
    ],
)
def test_a_coefficient_that_could_not_follow_the_entropy(coef, control, message):
    changed = EntropyControlConfig(**{"target": 0.3} | control)
    algorithm = dataclasses.replace(CONTROLLED, entropy_coef=coef, entropy_control=changed)
    assert message in refusal(check_entropy_control, algorithm, vocab_size=67)


@pytest.mark.parametrize("field", ["target", "step", "min_coef", "max_coef"])
def test_a_field_of_the_entropy_control_out_of_range(field):
    config = run(entropy_control=EntropyControlConfig(**{field: -0.1}))
    assert f"algorithm.entropy_control.{field}=-0.1: must" in refusal(check_fields, config)


def test_an_entropy_control_that_can_follow():
    check_entropy_control(CONTROLLED, vocab_size=67)
    check_entropy_control(AlgorithmConfig(entropy_control=EntropyControlConfig()), vocab_size=2)
    check_entropy_control(AlgorithmConfig(), vocab_size=1)
    check_fields(run(entropy_control=EntropyControlConfig()))

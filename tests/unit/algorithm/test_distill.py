"""A teacher's say as advantages, and its distribution as targets, against sums written out in NumPy."""

import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.rollouts import group, rollout, turn
from torchtitan_rl.algorithm.datums import to_datums
from torchtitan_rl.algorithm.distill import teacher_request, token_advantages, with_teacher
from torchtitan_rl.algorithm.grouping import form_groups
from torchtitan_rl.algorithm.inputs import minibatches
from torchtitan_rl.algorithm.losses import importance_sampling, ppo
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.algorithm.reductions import token_mean
from torchtitan_rl.algorithm.soft_targets import appended
from torchtitan_rl.config.algorithm import AlgorithmConfig, DistillConfig
from torchtitan_rl.types import Datum, LossInputs

logprob = st.floats(-15, 0)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(pairs=st.lists(st.tuples(logprob, logprob), max_size=9), coef=st.floats(0.01, 5), discount=st.floats(0, 1))
def test_each_token_is_given_the_discounted_sum_from_itself_on(pairs, coef, discount):
    student, teacher = [s for s, _ in pairs], [t for _, t in pairs]
    got = token_advantages(student, teacher, coef=coef, discount=discount)
    difference = np.array(student) - np.array(teacher)
    want = [-coef * sum(discount ** (s - t) * difference[s] for s in range(t, len(pairs))) for t in range(len(pairs))]
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_without_discount_it_is_the_tokens_own_difference():
    assert token_advantages([-1.0, -2.0], [-3.0, -0.5], coef=2.0) == [-4.0, 3.0]


def test_what_a_token_can_earn_is_held_and_a_token_that_does_not_train_counts_nothing():
    assert token_advantages([-0.5, -math.inf, -1.0], [-math.inf, -1.0, -90.0], coef=1.0) == [-20.0, 0.0, -20.0]


def test_a_teacher_that_says_nan_or_scores_other_tokens_is_an_error():
    with pytest.raises(ValueError, match="NaN"):
        token_advantages([-1.0], [math.nan], coef=1.0)
    with pytest.raises(ValueError, match="2 tokens of 1"):
        token_advantages([-1.0], [-1.0, -2.0], coef=1.0)


def datum(**inputs):
    columns = {
        "loss_mask": [0.0, 1.0, 1.0],
        "token_weights": [0.0, 0.5, 0.25],
        "advantages": [0.0, 1.0, 1.0],
        "sampling_logprobs": [0.0, -1.0, -2.0],
        "teacher_logprobs": [-9.0, -1.5, -0.5],
    } | inputs
    return Datum(
        tokens=torch.tensor([4, 5, 6]),
        target_tokens=torch.tensor([5, 6, 7]),
        loss_inputs={name: torch.tensor(column) for name, column in columns.items()},
    )


@pytest.mark.parametrize(
    ("rewards", "discount", "want"),
    [(False, 0.0, [0.0, -2.0, 2.0]), (True, 0.0, [0.0, -1.0, 3.0]), (False, 0.5, [0.0, -1.25, 1.25])],
)
def test_a_teachers_log_ratio_less_its_mean_takes_the_place_of_the_advantage_or_is_added(rewards, discount, want):
    config = DistillConfig(coef=2.0, rewards=rewards, discount=discount)
    assert teacher_request(config) == {}
    (changed,) = with_teacher([datum()], None, config)
    assert changed.loss_inputs["advantages"].tolist() == want


def test_a_discount_reaches_from_a_datum_back_to_those_before_it_of_the_same_rollout():
    data = [datum(), datum(), datum()]
    for one, place in zip(data, (0, 1, 0), strict=True):
        one.rollout = place
    changed = with_teacher(data, None, DistillConfig(discount=0.5))
    # Every datum's differences are 0.5 and -1.5. From the last token back: 1.5, -(0.5 - 1.5 / 2) = 0.25,
    # -(-1.5 - 0.25 / 2) = 1.625, -(0.5 - 1.625 / 2) = 0.3125; all six less their mean.
    want = torch.tensor([[0.3125, 1.625], [0.25, 1.5], [0.25, 1.5]])
    assert torch.equal(torch.stack([one.loss_inputs["advantages"][1:] for one in changed]), want - want.mean())


def test_the_teacher_is_asked_for_what_the_divergence_needs():
    assert teacher_request(None) == {}
    assert teacher_request(DistillConfig(divergence="top_k", top_k=5)) == {"top_k": 5}
    assert teacher_request(DistillConfig(divergence="full")) == {"hidden": True}


TOP = SimpleNamespace(
    top_tokens=[torch.tensor([[1, 2], [6, 3], [7, 8]])],
    top_logprobs=[torch.tensor([[0.9, 0.1], [0.7, 0.2], [0.5, 0.25]]).log()],
)


def test_a_teachers_likeliest_tokens_become_targets_weighed_like_the_token():
    config = DistillConfig(divergence="top_k", top_k=2, coef=2.0)
    data = with_teacher([datum()], TOP, config)
    (made,) = appended(minibatches(data, AlgorithmConfig(tasks_per_minibatch=1, reduction=token_mean))[0])
    assert made.target_tokens.tolist() == [[5, 1, 2], [6, 6, 3], [7, 7, 8]]
    assert not made.loss_inputs.keys() & {"soft_tokens", "soft_shares"}
    want = (
        2 * np.array([[0, 0], [0.5, 0.5], [0.5, 0.5]]) * [[0.9, 0.1], [0.7, 0.2], [0.5, 0.25]]
    )  # weights of token_mean
    np.testing.assert_allclose(made.loss_inputs["soft_weights"], want, rtol=1e-6)


def test_in_one_call_all_have_as_many_targets():
    def soft(tokens, shares):
        return torch.tensor(tokens), torch.tensor(shares)

    wide = rollout(
        "a", turn([1], [2, 3], advantages=0.0, soft_targets=soft([[6, 7], [7, 8]], [[0.5, 0.5], [1.0, 0.0]]))
    )
    narrow = rollout("b", turn([1], [4], advantages=0.0, soft_targets=soft([[6]], [[0.5]])))
    without = rollout("c", turn([1], [5], advantages=0.0))
    made = appended(to_datums([group(wide, narrow, without)], AlgorithmConfig()))
    assert [tuple(one.target_tokens.shape) for one in made] == [(2, 3), (1, 3), (1, 3)]
    assert not made[1].loss_inputs["soft_weights"][:, 1].any() and not made[2].loss_inputs["soft_weights"].any()


def test_targets_that_turns_bring_keep_their_places_over_turns_that_extend_each_other():

    def soft(tokens, weights):
        return torch.tensor(tokens), torch.tensor(weights)

    first = turn([1], [2, 3], advantages=0.0, soft_targets=soft([[2, 9], [3, 8]], [[0.5, 0.25], [1.0, 0.0]]))
    second = turn([1, 2, 3, 4], [5], advantages=0.0, soft_targets=soft([[6]], [[0.75]]))
    (made,) = to_datums([group(rollout("a", first, second))], AlgorithmConfig())
    tokens, weights = made.loss_inputs["soft_tokens"], made.loss_inputs["soft_shares"]
    assert made.target_tokens.tolist() == [2, 3, 4, 5]
    assert tokens.tolist() == [[2, 9], [3, 8], [0, 0], [6, 0]]
    assert weights.tolist() == [[0.5, 0.25], [1.0, 0.0], [0.0, 0.0], [0.75, 0.0]]
    for wrong in (soft([[6]], [[0.75]]), soft([[6], [7]], [[0.5, 0.5], [0.5, 0.5]])):
        with pytest.raises(ValueError, match="rollout a sampled 2 tokens; give tokens"):
            to_datums([group(rollout("a", turn([1], [2, 3], soft_targets=wrong)))], AlgorithmConfig())


def test_targets_computed_for_an_older_version_do_not_train():
    def made(policy_version, share=0.5):
        soft = torch.tensor([[6], [7]]), torch.tensor([[0.5], [share]])
        old = turn([1], [2, 3], soft_targets=soft, version=3)
        new = turn([1], [2, 3], version=4)
        rollouts = [rollout("a", old, reward=1.0), rollout("b", new, reward=0.0)]
        groups = form_groups(rollouts, AlgorithmConfig(), policy_version=policy_version)
        return ["soft_tokens" in datum.loss_inputs for datum in to_datums(groups, AlgorithmConfig())]

    assert made(4) == [False, False] and made(3) == [True, True]
    with pytest.raises(ValueError, match="of rollout a are not all finite"):
        made(3, share=math.nan)


def loss_inputs(policy, **tensors):
    columns = {
        "token_weights": [0.0, 0.5, 0.25],
        "loss_mask": [0.0, 1.0, 1.0],
        "advantages": [0.0, 1.0, -2.0],
        "sampling_logprobs": [0.0, -1.0, -2.0],
    } | tensors
    double = partial(torch.tensor, dtype=torch.float64)
    return LossInputs(
        policy_logprobs=double(policy).requires_grad_(),
        entropy=double([1.0, 1.0, 1.0]),
        datum=torch.zeros(3, dtype=torch.long),
        num_datums=1,
        tensors={name: double(value) for name, value in columns.items()},
    )


SOFT = {"soft_weights": [[0.0, 0.0], [0.35, 0.1], [0.125, 0.0625]]}
LOGPROBS = [[-1.0, -1.0, -1.0], [-1.1, -0.9, -2.0], [-2.0, -0.5, -1.5]]
CROSS_ENTROPY = 0.35 * 0.9 + 0.1 * 2.0 + 0.125 * 0.5 + 0.0625 * 1.5
PLAIN = -(0.5 * math.exp(-0.1) - 0.25 * 2)


@pytest.mark.parametrize("alone", [True, False])
def test_the_objective_adds_a_cross_entropy_or_is_one(alone):
    distill = DistillConfig(divergence="top_k", rewards=not alone)
    inputs = loss_inputs(LOGPROBS, **SOFT)
    loss, metrics = policy_objective(AlgorithmConfig(loss_fn=importance_sampling, distill=distill))(inputs)
    assert loss.item() == pytest.approx(CROSS_ENTROPY + (0 if alone else PLAIN), rel=1e-12)
    (grad,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    np.testing.assert_allclose(grad[:, 1:], -np.array(SOFT["soft_weights"]), rtol=1e-12)
    assert (grad[:, 0] == 0).all() if alone else grad[1:, 0].abs().min() > 0
    assert metrics["distill/target_frac"] == 2
    shares = np.array([[0.35 / 0.45, 0.1 / 0.45], [2 / 3, 1 / 3]])
    want = (shares * (np.log(shares) - np.array(LOGPROBS)[1:, 1:])).sum()
    assert float(metrics["distill/kl"]) == pytest.approx(want, rel=1e-10)


def test_targets_of_a_workflow_count_without_a_teacher_role():
    loss, _ = policy_objective(AlgorithmConfig(loss_fn=ppo), SOFT)(loss_inputs(LOGPROBS, **SOFT, advantages=[0.0] * 3))
    assert loss.item() == pytest.approx(CROSS_ENTROPY)


def test_how_far_the_policy_is_from_the_teacher_is_measured_on_what_trains():
    inputs = loss_inputs([-1.0, -1.5, -2.0], teacher_logprobs=[-7.0, -1.0, -4.0])
    _, metrics = policy_objective(AlgorithmConfig(loss_fn=importance_sampling), inputs.tensors)(inputs)
    assert float(metrics["distill/kl"]) == pytest.approx(-0.5 + 2.0)

"""Losses against their formulas written out in numpy, one token at a time, in double precision."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.algorithm.losses import (
    cispo,
    cross_entropy,
    dppo_kl,
    dppo_tv,
    dro,
    gmpo,
    gspo,
    importance_sampling,
    ppo,
    reverse_kl,
    sampled_metrics,
    sapo,
    trained_before,
    value_loss,
    vespo,
)
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import LossInputs

POLICY_LOSSES = [importance_sampling, ppo]


def loss_inputs(
    policy_logprobs,
    *,
    sampling_logprobs=None,
    advantages=None,
    weights=None,
    loss_mask=None,
    entropy=None,
    dtype=torch.float64,
):
    """LossInputs of one datum from lists; the policy's log-probabilities require gradient."""

    def tensor(values, default):
        values = [default] * len(policy_logprobs) if values is None else values
        return torch.tensor(values, dtype=dtype)

    return LossInputs(
        policy_logprobs=torch.tensor(policy_logprobs, dtype=dtype).requires_grad_(),
        entropy=tensor(entropy, 0.0),
        datum=torch.zeros(len(policy_logprobs), dtype=torch.long),
        num_datums=1,
        tensors={
            "sampling_logprobs": tensor(sampling_logprobs, 0.0),
            "advantages": tensor(advantages, 0.0),
            "token_weights": tensor(weights, 1.0),
            "loss_mask": tensor(loss_mask, 1.0),
        },
    )


def value_and_grad(loss_fn, inputs, **config):
    loss, metrics = loss_fn(inputs, **config)
    if loss_fn is not cross_entropy:  # as a training step of the policy reports them
        objective = policy_objective(AlgorithmConfig(loss_fn=loss_fn, loss_config=config))
        metrics = {**sampled_metrics(inputs), **objective(inputs)[1]}
    (grad_T,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    return loss.item(), grad_T.tolist(), {name: float(value) for name, value in metrics.items()}


def reference(name, inputs, clip_low=0.2, clip_high=0.2):
    """(loss, gradient by log-probability, tokens clipped) from the formulas, token by token."""
    policy, sampling, advantage, weight, mask = (
        x.detach().numpy().astype(np.float64)
        for x in (
            inputs.policy_logprobs,
            inputs.sampling_logprobs,
            inputs.advantages,
            inputs.token_weights,
            inputs.loss_mask,
        )
    )
    loss, grad, num_clipped = 0.0, np.zeros_like(policy), 0
    for t in range(len(policy)):
        if not mask[t]:
            continue
        ratio = np.exp(policy[t] - sampling[t])
        if name == "cross_entropy":
            loss -= weight[t] * policy[t]
            grad[t] = -weight[t]
            continue
        objective = ratio * advantage[t]
        if name == "ppo":
            # A positive advantage stops paying above the upper bound, a negative one below the lower.
            if advantage[t] > 0 and ratio > 1 + clip_high:
                loss, num_clipped = loss - weight[t] * (1 + clip_high) * advantage[t], num_clipped + 1
                continue
            if advantage[t] < 0 and ratio < 1 - clip_low:
                loss, num_clipped = loss - weight[t] * (1 - clip_low) * advantage[t], num_clipped + 1
                continue
        loss -= weight[t] * objective
        grad[t] = -weight[t] * objective  # d ratio / d log-probability is the ratio
    return loss, grad.tolist(), num_clipped


def test_cross_entropy_is_the_weighted_negative_log_probability():
    inputs = loss_inputs([-1.0, -2.0, -4.0], weights=[0.5, 0.25, 0.0])
    assert value_and_grad(cross_entropy, inputs) == (1.0, [-0.5, -0.25, 0.0], {})


def test_cross_entropy_needs_weights_only():
    inputs = LossInputs(
        policy_logprobs=torch.tensor([-3.0]),
        entropy=torch.zeros(1),
        datum=torch.zeros(1),
        num_datums=1,
        tensors={"token_weights": torch.ones(1)},
    )
    assert cross_entropy(inputs)[0].item() == 3.0


def several_targets(policy_TK, weights, loss_mask):
    length = len(policy_TK)
    return LossInputs(
        policy_logprobs=torch.tensor(policy_TK).requires_grad_(),
        entropy=torch.full((length,), 0.5),
        datum=torch.zeros(length, dtype=torch.long),
        num_datums=1,
        tensors={
            "token_weights": torch.tensor(weights),
            "loss_mask": torch.tensor(loss_mask),
            "sampling_logprobs": torch.zeros(length),
            "advantages": torch.ones(length),
        },
    )


def test_the_cross_entropy_of_several_targets_is_top_k_distillation():
    # Two tokens, a teacher's probabilities of three tokens each; the first token does not train.
    inputs = several_targets([[-1.0, -2.0, -3.0], [-0.5, -1.0, -2.0]], [[0.0] * 3, [0.5, 0.25, 0.125]], [0.0, 1.0])
    loss, metrics = cross_entropy(inputs)
    assert loss.item() == pytest.approx(0.5 * 0.5 + 0.25 * 1.0 + 0.125 * 2.0) and metrics == {}
    (grad_TK,) = torch.autograd.grad(loss, inputs.policy_logprobs)
    assert grad_TK.tolist() == [[0.0] * 3, [-0.5, -0.25, -0.125]]
    # What was sampled is none of the targets: nothing is said about how generator and trainer disagree.
    metrics = {name: float(x) for name, x in sampled_metrics(inputs).items()}
    assert metrics == {"policy/entropy": 0.5, "advantage/mean": 1.0, "advantage/abs_max": 1.0}


@pytest.mark.parametrize("policy_TK", [[[-1.0], [-2.0]], [[-1.0, -2.0], [-0.5, -1.0]]])
def test_several_targets_need_a_weight_each(policy_TK):
    with pytest.raises(
        ValueError, match=r"token_weights: have shape \(2,\) where the targets' log-probabilities have \(2, "
    ):
        cross_entropy(several_targets(policy_TK, [0.5, 0.5], [1.0, 1.0]))


@pytest.mark.parametrize("loss_fn", [importance_sampling, ppo, gspo, cispo, dro, sapo, gmpo, dppo_tv, dppo_kl, vespo])
@pytest.mark.parametrize("num_targets", [1, 2, 3])
def test_losses_of_the_sampled_token_refuse_several_targets(loss_fn, num_targets):
    """Two tokens with two targets each would broadcast to every pair of tokens, and train on it."""
    inputs = several_targets([[-1.0] * num_targets] * 2, [0.5, 0.5], [1.0, 1.0])
    message = rf"have shape \(2, {num_targets}\) where loss_mask has \(2,\); give one number per token: several targets"
    with pytest.raises(ValueError, match=message):
        loss_fn(inputs)


@pytest.mark.parametrize("name", ["advantages", "token_weights"])
def test_columns_of_several_numbers_do_not_broadcast_either(name):
    inputs = loss_inputs([-1.0, -2.0], advantages=[1.0, 1.0])
    inputs.tensors[name] = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"have shape \(2, 2\) where loss_mask has \(2,\)"):
        ppo(inputs)


def test_reverse_kl_is_the_weighted_sum_of_the_kl():
    inputs = loss_inputs([-1.0, -2.0, -3.0], weights=[0.0, 0.5, 0.25], loss_mask=[0, 1, 1])
    with pytest.raises(ValueError, match="teacher_kl=None: the data carry no teacher_hidden"):
        reverse_kl(inputs)
    inputs.teacher_kl = torch.tensor([9.0, 0.5, 2.0], dtype=torch.float64).requires_grad_()
    loss, metrics = reverse_kl(inputs)
    assert loss.item() == 0.5 * 0.5 + 0.25 * 2.0 and metrics["distill/kl"].item() == 2.5
    assert not metrics["distill/kl"].requires_grad
    assert torch.autograd.grad(loss, inputs.teacher_kl)[0].tolist() == [0.0, 0.5, 0.25]


def test_importance_sampling_multiplies_by_the_ratio():
    # Ratios 2 and 1/4: -(0.5 * 2 * 3 + 0.5 * 0.25 * -8) = -(3 - 1).
    inputs = loss_inputs(
        [math.log(0.5), math.log(0.1)],
        sampling_logprobs=[math.log(0.25), math.log(0.4)],
        advantages=[3.0, -8.0],
        weights=[0.5, 0.5],
    )
    loss, grad, _ = value_and_grad(importance_sampling, inputs)
    assert loss == pytest.approx(-2.0) and grad == pytest.approx([-3.0, 1.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "grad", "clipped"),
    [
        (1.5, 1.0, 1.3, 0.0, 1),  # beyond the upper bound and it would pay: clipped
        (1.5, -1.0, -1.5, 1.5, 0),  # beyond it, and it hurts: not clipped
        (0.5, 1.0, 0.5, -0.5, 0),  # below the lower bound, and the way back pays: not clipped
        (0.5, -1.0, -0.9, 0.0, 1),  # below it and it would pay: clipped
        (1.25, 1.0, 1.25, -1.25, 0),  # between 1 + clip_low and 1 + clip_high
        (0.8, -1.0, -0.9, 0.0, 1),  # between 1 - clip_high and 1 - clip_low
        (1.2, -2.0, -2.4, 2.4, 0),
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_ppo_with_bounds_of_different_width(ratio, advantage, objective, grad, clipped):
    inputs = loss_inputs([math.log(ratio)], advantages=[advantage])
    loss, (gradient,), metrics = value_and_grad(ppo, inputs, clip_low=0.1, clip_high=0.3)
    assert loss == pytest.approx(-objective) and gradient == pytest.approx(grad)
    assert metrics["policy/clip_frac"] == clipped


def test_ppo_on_the_policy_that_sampled_is_the_plain_policy_gradient():
    inputs = loss_inputs([-1.0, -2.0], sampling_logprobs=[-1.0, -2.0], advantages=[2.0, -3.0], weights=[0.5, 0.5])
    loss, grad, metrics = value_and_grad(ppo, inputs)
    assert loss == 0.5 and grad == [-1.0, 1.5] and metrics["policy/clip_frac"] == 0


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    ragged=st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5),
    seed=st.integers(0, 2**32),
    clip_low=st.floats(0.0, 0.9),
    clip_high=st.floats(0.0, 3.0),
)
def test_losses_equal_their_formulas_on_ragged_masks(ragged, seed, clip_low, clip_high):
    rng = np.random.default_rng(seed)
    documents = []
    for mask in ragged:
        masked = np.array(mask, dtype=np.float64)
        documents.append(
            loss_inputs(
                rng.uniform(-3, 0, len(mask)).tolist(),
                sampling_logprobs=rng.uniform(-3, 0, len(mask)).tolist(),
                advantages=rng.normal(size=len(mask)).tolist(),
                loss_mask=masked.tolist(),
                weights=(masked * rng.uniform(0.1, 1, len(mask))).tolist(),
            )
        )
    names = documents[0].tensors
    packed = LossInputs(
        policy_logprobs=torch.cat([d.policy_logprobs for d in documents]).detach().requires_grad_(),
        entropy=torch.cat([d.entropy for d in documents]),
        num_datums=len(documents),
        datum=torch.repeat_interleave(torch.tensor([len(mask) for mask in ragged])),
        tensors={name: torch.cat([d.tensors[name] for d in documents]) for name in names},
    )
    for loss_fn, config in (
        (cross_entropy, {}),
        (importance_sampling, {}),
        (ppo, {"clip_low": clip_low, "clip_high": clip_high}),
    ):
        loss, grad, metrics = value_and_grad(loss_fn, packed, **config)
        expected_loss, expected_grad, num_clipped = reference(loss_fn.__name__, packed, **config)
        assert loss == pytest.approx(expected_loss, abs=1e-12)
        assert grad == pytest.approx(expected_grad, abs=1e-12)
        assert all(g == 0.0 for g, m in zip(grad, packed.loss_mask.tolist(), strict=True) if not m)
        if loss_fn is ppo:
            assert metrics["policy/clip_frac"] == num_clipped
        # A sum over tokens: the documents one by one give the same.
        parts = [value_and_grad(loss_fn, document, **config) for document in documents]
        assert sum(part[0] for part in parts) == pytest.approx(loss, abs=1e-12)
        assert [g for part in parts for g in part[1]] == pytest.approx(grad, abs=1e-15)
        for name, value in metrics.items():
            together = max if name.endswith("_max") else sum
            assert together(part[2][name] for part in parts) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize("garbage", [3e38, -3e38, 200.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_masked_tokens_have_exactly_no_gradient_whatever_they_hold(loss_fn, garbage):
    for policy, sampling in ((garbage, 0.0), (0.0, garbage), (garbage, garbage)):
        inputs = loss_inputs(
            [policy, -1.0, policy],
            sampling_logprobs=[sampling, -1.0, sampling],
            advantages=[1e30, 2.0, -1e30],
            weights=[0.0, 0.5, 0.0],
            loss_mask=[0.0, 1.0, 0.0],
            entropy=[math.nan, 0.75, math.inf],
            dtype=torch.float32,
        )
        loss, grad, metrics = value_and_grad(loss_fn, inputs)
        assert loss == -1.0 and grad == [0.0, -1.0, 0.0]
        assert metrics == {
            "policy/entropy": 0.75,
            "mismatch/kl": 0.0,
            "mismatch/logprob_diff_max": 0.0,
            "advantage/mean": 2.0,
            "advantage/abs_max": 2.0,
            **({"policy/clip_frac": 0.0} if loss_fn is ppo else {}),
        }


@pytest.mark.parametrize("garbage", [3e38, -3e38])
def test_masked_tokens_have_exactly_no_gradient_in_the_cross_entropy(garbage):
    inputs = loss_inputs([garbage, -1.0], weights=[0.0, 0.5], loss_mask=[0.0, 1.0], dtype=torch.float32)
    assert value_and_grad(cross_entropy, inputs) == (0.5, [0.0, -0.5], {})


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_metrics_are_sums_over_trained_tokens(loss_fn):
    # log-ratios log 2, -log 4 and, not trained, log 8; k3 = r - 1 - log r.
    inputs = loss_inputs(
        [math.log(2), -math.log(4), math.log(8)],
        loss_mask=[1.0, 1.0, 0.0],
        weights=[0.5, 0.5, 0.0],
        advantages=[1.0, 1.0, 1.0],
        entropy=[0.5, 1.25, 100.0],
    )
    _, _, metrics = value_and_grad(loss_fn, inputs)
    assert metrics.pop("policy/clip_frac", 1) == 1  # the first; the second is on the side where nothing is clipped
    assert metrics == {
        "policy/entropy": 1.75,
        "mismatch/kl": pytest.approx((2 - 1 - math.log(2)) + (0.25 - 1 + math.log(4))),
        "mismatch/logprob_diff_max": pytest.approx(math.log(4)),
        "advantage/mean": 2.0,
        "advantage/abs_max": 1.0,
    }


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_the_mismatch_of_nearly_equal_log_probabilities_is_not_lost_to_rounding(loss_fn):
    # k3 of a log-ratio d is d^2 / 2 to leading order; in float32 r - 1 - log r would be all rounding error.
    inputs = loss_inputs([-0.5 + 2.0**-12] * 4, sampling_logprobs=[-0.5] * 4, dtype=torch.float32)
    _, _, metrics = value_and_grad(loss_fn, inputs)
    assert metrics["mismatch/kl"] == pytest.approx(4 * 2.0**-25, rel=1e-3)


@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_a_filler_contributes_nothing(loss_fn):
    inputs = loss_inputs([-7.0], weights=[0.0], loss_mask=[0.0], entropy=[2.0])
    loss, grad, metrics = value_and_grad(loss_fn, inputs)
    assert loss == 0.0 and grad == [0.0] and set(metrics.values()) == {0.0}


@pytest.mark.parametrize(
    ("loss_fn", "names"),
    [
        (cross_entropy, ["token_weights"]),
        (importance_sampling, ["token_weights", "advantages", "sampling_logprobs"]),
        (ppo, ["token_weights", "advantages", "sampling_logprobs"]),
    ],
)
def test_gradients_by_finite_differences(loss_fn, names):
    # Ratios 0.5, 0.9, 1.1, 1.6 with both signs of advantage, all away from the bounds 0.8 and 1.2.
    ratios = np.array([0.5, 0.9, 1.1, 1.6, 0.5, 0.9, 1.1, 1.6, 1.0])
    fixed = loss_inputs(
        np.log(ratios).tolist(),
        advantages=[1.5] * 4 + [-0.5] * 4 + [1.0],
        weights=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.0],
        loss_mask=[1.0] * 8 + [0.0],
    )

    def loss(policy_logprobs, *tensors):
        return loss_fn(
            LossInputs(
                policy_logprobs=policy_logprobs,
                entropy=fixed.entropy,
                datum=fixed.datum,
                num_datums=1,
                tensors={**fixed.tensors, **dict(zip(names, tensors, strict=True))},
            )
        )[0]

    arguments = [fixed.policy_logprobs, *(fixed.tensors[name].clone().requires_grad_() for name in names)]
    assert torch.autograd.gradcheck(loss, arguments)


def test_a_ratio_that_would_overflow_stays_finite_in_value_and_gradient():
    policy = torch.tensor([0.0, -1.0], requires_grad=True)
    inputs = LossInputs(
        policy_logprobs=policy,
        entropy=torch.zeros(2),
        datum=torch.zeros(2, dtype=torch.long),
        num_datums=1,
        tensors={
            "token_weights": torch.ones(2),
            "loss_mask": torch.ones(2),
            "advantages": torch.tensor([1.0, -1.0]),
            "sampling_logprobs": torch.tensor([-100.0, -101.0]),
        },
    )
    loss, _ = ppo(inputs)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(policy.grad).all()


def value_inputs(predicted, values, returns, mask):
    return LossInputs(
        predicted_values=torch.tensor(predicted, requires_grad=True),
        datum=torch.zeros(len(mask)),
        num_datums=1,
        tensors={
            "token_weights": torch.tensor(mask) / 2,
            "loss_mask": torch.tensor(mask),
            "values": torch.tensor(values),
            "returns": torch.tensor(returns),
        },
    )


def test_a_value_loss_is_half_the_squared_error():
    inputs = value_inputs([1.0, 3.0, 5.0], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0])
    loss, metrics = value_loss(inputs)
    assert loss.item() == 0.5 * (0.5 * 1 + 0.5 * 4)
    assert {name: float(value) for name, value in metrics.items()} == {
        "critic/squared_error": 5.0,
        "critic/value_mean": 4.0,
    }
    (gradient,) = torch.autograd.grad(loss, inputs.predicted_values)
    assert gradient.tolist() == [0.5, 1.0, 0.0]


def test_a_clipped_value_gains_nothing_by_going_further():
    """The value moved from 0 to 1 towards a return of 2; with a clip of 0.5 the held error is larger, without
    gradient."""
    inputs = value_inputs([1.0], [0.0], [2.0], [1.0])
    loss, _ = value_loss(inputs, clip=0.5)
    assert loss.item() == 0.5 * 0.5 * 1.5**2
    assert torch.autograd.grad(loss, inputs.predicted_values)[0].item() == 0.0


def test_ratios_are_against_recomputed_log_probabilities_where_there_are_some():
    inputs = loss_inputs([-1.0], sampling_logprobs=[-3.0], advantages=[1.0])
    inputs.tensors["old_logprobs"] = torch.tensor([-1.0])
    assert importance_sampling(inputs)[0].item() == -1.0


def test_trained_tokens_are_counted_within_their_datum():
    made = LossInputs(
        datum=torch.tensor([0, 0, 0, 0, 1, 2, 2, 2]),
        num_datums=3,
        tensors={"loss_mask": torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0])},
    )
    assert trained_before(made).tolist() == [0, 0, 1, 2, 0, 0, 1, 1]


def test_the_pages_loss_clips_by_position():
    page = (Path(__file__).parents[3] / "docs" / "algorithms.md").read_text()
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "clipped_by_position" in block
    )
    names = {"torch": torch}
    exec(code, names)
    # Two completions of five tokens; every ratio is e^0.15 = 1.16, within 1.2 and beyond 1.1: their fifth tokens clip.
    policy = torch.full((10,), -1.0, requires_grad=True)
    made = LossInputs(
        policy_logprobs=policy,
        datum=torch.tensor([0] * 5 + [1] * 5),
        num_datums=2,
        turns=[[(0, 0, 5)], [(0, 0, 5)]],
        tensors={
            "token_weights": torch.ones(10),
            "loss_mask": torch.ones(10),
            "advantages": torch.ones(10),
            "sampling_logprobs": torch.full((10,), -1.15),
        },
    )
    loss, _ = names["clipped_by_position"](made)
    assert loss.item() == pytest.approx(-(8 * math.exp(0.15) + 2 * 1.1))
    (grad,) = torch.autograd.grad(loss, policy)
    assert grad.tolist() == pytest.approx(([-math.exp(0.15)] * 4 + [0.0]) * 2)

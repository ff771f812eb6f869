"""Losses in a service's words, against the losses themselves: values and derivatives in float64, by autograd."""

import dataclasses
from functools import partial

import pytest
import torch

from tests.integration.helpers import random_datums
from torchtitan_rl.algorithm import losses, reductions
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.dispatch.tinker.loss_terms import evaluate, linearized, service_loss
from torchtitan_rl.types import Datum, LossInputs


def _logprobs(data, seed=1):
    """Float64, near the sampling log-probabilities, so that ratios are inside and outside of the usual bounds."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for datum in data:
        near = datum.loss_inputs["sampling_logprobs"].double()
        noise = torch.randn(near.shape, generator=generator, dtype=torch.float64) * 0.4
        rows.append(torch.where(datum.loss_inputs["loss_mask"] > 0, near + noise, -3.0 + noise))
    return rows


def _derivatives(function, rows):
    """(value, derivative by each row) of `function(rows)`."""
    leaves = [row.clone().requires_grad_(True) for row in rows]
    value = function(leaves)
    return value.item(), torch.autograd.grad(value, leaves)


def _itself(loss_fn, data, weight):
    """weight x the loss, as a function of the log-probabilities."""

    def loss(rows):
        lengths = torch.tensor([len(datum) for datum in data])
        tensors = {name: torch.cat([d.loss_inputs[name].double() for d in data]) for name in data[0].loss_inputs}
        inputs = LossInputs(
            policy_logprobs=torch.cat(rows),
            datum=torch.repeat_interleave(lengths),
            num_datums=len(data),
            tensors=tensors,
            turns=[datum.turns for datum in data],
        )
        return weight * loss_fn(inputs)[0]

    return loss


def _as_the_service(said):
    """What the protocol's public definitions compute from a request, written out."""
    rows_of, bounds = said.inputs, said.config

    def loss(rows):
        total = torch.zeros((), dtype=torch.float64)
        for logprobs, given in zip(rows, rows_of, strict=True):
            if said.name == "cross_entropy":
                total = total - (logprobs * given["weights"].double()).sum()
                continue
            advantages = given["advantages"].double()
            ratio = (logprobs - given["logprobs"].double()).exp()
            if said.name == "importance_sampling":
                total = total - (ratio * advantages).sum()
            elif said.name == "ppo":
                clipped = ratio.clamp(bounds["clip_low_threshold"], bounds["clip_high_threshold"])
                total = total - torch.minimum(ratio * advantages, clipped * advantages).sum()
            else:
                assert said.name == "cispo"
                clipped = ratio.clamp(bounds["clip_low_threshold"], bounds["clip_high_threshold"]).detach()
                total = total - (clipped * logprobs * advantages).sum()
        return total

    return loss


KNOWN = [
    losses.cross_entropy,
    losses.importance_sampling,
    losses.ppo,
    partial(losses.ppo, clip_low=0.3, clip_high=0.1),
    losses.cispo,
    partial(losses.cispo, clip_low=0.2, clip_high=0.2),
]
UNKNOWN = [losses.gspo, losses.dro, partial(losses.ppo, dual_clip=1.5), lambda inputs: losses.ppo(inputs)]


@pytest.mark.parametrize("loss_fn", KNOWN)
@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_a_known_loss_in_the_services_words_is_the_loss(loss_fn, weight):
    data = random_datums(12, seed=3)
    rows = _logprobs(data)
    said = service_loss(loss_fn, data, weight)
    value, expected = _derivatives(_itself(loss_fn, data, weight), rows)
    sent_value, sent = _derivatives(_as_the_service(said), rows)
    if said.name != "cross_entropy":
        assert sent_value == pytest.approx(value, rel=1e-6)
    for one, other in zip(sent, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("loss_fn", KNOWN + UNKNOWN)
@pytest.mark.parametrize("weight", [1.0, -0.5])
def test_any_loss_as_a_cross_entropy_has_the_losss_derivatives(loss_fn, weight):
    data = random_datums(12, seed=4)
    rows = _logprobs(data)
    found = evaluate(loss_fn, data, rows, weight=weight)
    value, expected = _derivatives(_itself(loss_fn, data, weight), rows)
    said = linearized(data, found.gradients)
    _, sent = _derivatives(_as_the_service(said), rows)
    assert found.loss * weight == pytest.approx(value, rel=1e-6) and said.name == "cross_entropy"
    assert any(bool(row.abs().max() > 1e-6) for row in expected), "else nothing was compared"
    for one, other in zip(sent, expected, strict=True):
        assert torch.allclose(one, other, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("loss_fn", UNKNOWN)
def test_what_the_service_cannot_say_exactly_is_not_sent_by_name(loss_fn):
    assert service_loss(loss_fn, random_datums(4), 1.0) is None


def test_a_negative_weight_turns_a_minimum_round_and_is_not_sent_by_name():
    data = random_datums(4)
    assert service_loss(losses.ppo, data, -1.0) is None
    assert service_loss(losses.importance_sampling, data, -1.0) is not None


@pytest.mark.parametrize("loss_fn", [losses.cross_entropy, losses.importance_sampling])
def test_a_weight_that_is_not_finite_is_not_sent(loss_fn):
    data = random_datums(3)
    assert service_loss(loss_fn, data, float("nan")) is None
    found = evaluate(loss_fn, data, _logprobs(data), weight=float("nan"))
    assert not all(torch.isfinite(row).all() for row in found.gradients)


def test_several_targets_a_token_have_weights_and_derivatives_of_their_own():
    generator, data, rows = torch.Generator().manual_seed(0), [], []
    for length in (3, 5):
        weights = torch.rand(length, 4, generator=generator)
        targets = torch.randint(0, 60, (length, 4), generator=generator)
        data.append(Datum(tokens=torch.arange(length), target_tokens=targets, loss_inputs={"token_weights": weights}))
        rows.append(-torch.rand(length, 4, generator=generator, dtype=torch.float64))
    said, found = service_loss(losses.cross_entropy, data, 2.0), evaluate(losses.cross_entropy, data, rows, weight=2.0)
    for of_name, of_gradient in zip(said.inputs, linearized(data, found.gradients).inputs, strict=True):
        assert of_name["weights"].shape == of_gradient["weights"].shape == of_name["target_tokens"].shape
        assert torch.allclose(of_name["weights"], of_gradient["weights"])


def test_the_objective_of_a_plain_config_is_known_and_its_metrics_are_computed_here():
    config = AlgorithmConfig(loss_fn=losses.importance_sampling, reduction=reductions.token_mean)
    objective, data = policy_objective(config), random_datums(6)
    said, found = service_loss(objective, data, 1.0), evaluate(objective, data, _logprobs(data))
    assert said.name == "importance_sampling" and found.gradients == []
    assert {"advantage/mean", "advantage/abs_max", "mismatch/kl", "policy/entropy"} <= found.sums.keys()


def test_a_correction_is_sent_as_a_cross_entropy():
    config = AlgorithmConfig(loss_fn=losses.importance_sampling, correction_fn=lambda inputs: None)
    assert service_loss(policy_objective(config), random_datums(3), 1.0) is None


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor, inputs: tensor.sum(),
        lambda tensor, inputs: tensor.shape,
        lambda tensor, inputs: tensor[inputs.loss_mask > 0],
        lambda tensor, inputs: inputs.loss_mask * tensor,
        lambda tensor, inputs: -tensor,
        lambda tensor, inputs: torch.where(inputs.loss_mask > 0, tensor, 0.0),
        lambda tensor, inputs: torch.stack([inputs.loss_mask, tensor]),
    ],
)
@pytest.mark.parametrize("name", ["entropy", "teacher_kl", "predicted_values"])
def test_a_loss_of_what_only_the_models_holder_knows_is_refused(name, use):
    def reads(inputs):
        return use(getattr(inputs, name), inputs), {}

    data = random_datums(2)
    with pytest.raises(ValueError, match=f"loss input '{name}': a remote service answers log-probabilities"):
        evaluate(reads, data, _logprobs(data), weight=1.0)


def test_a_loss_may_pass_on_what_it_does_not_read():
    def weighted(inputs):
        return losses.cross_entropy(dataclasses.replace(inputs, tensors=dict(inputs.tensors)))

    data = random_datums(3)
    plain, copied = (evaluate(loss_fn, data, _logprobs(data)) for loss_fn in (losses.cross_entropy, weighted))
    assert plain.loss == copied.loss


def test_a_loss_without_the_log_probabilities_has_no_gradient():
    data = random_datums(2)
    found = evaluate(lambda inputs: (torch.zeros(()), {}), data, _logprobs(data), weight=1.0)
    assert found.loss == 0.0 and all(not row.any() for row in found.gradients)

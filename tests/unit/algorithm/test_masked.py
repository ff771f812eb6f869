"""What lies where the loss mask is 0 reaches neither a sum nor a gradient; elsewhere not a bit has changed by it."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from torchtitan_rl.algorithm import corrections, kl, losses
from torchtitan_rl.algorithm.gae import gae
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.types import LossInputs

GARBAGE = [-math.inf, math.inf, math.nan, 1e30, -1e30]
OUTPUTS = ["policy_logprobs", "entropy", "teacher_kl", "predicted_values"]
COLUMNS = ["advantages", "sampling_logprobs", "old_logprobs", "reference_logprobs", "values", "returns"]
POLICY_LOSSES = [losses.importance_sampling, losses.ppo, losses.gspo, losses.cispo, losses.dro]
POLICY_LOSSES += [losses.sapo, losses.gmpo, losses.dppo_tv, losses.dppo_kl, losses.vespo]
CORRECTIONS = [getattr(corrections, name) for name in corrections.__all__ if name not in ("both", "opsm")]
CORRECTIONS += [partial(corrections.opsm, delta=0.01)]
CORRECTIONS += [partial(corrections.both, first=corrections.truncated_token, second=corrections.reject_geometric)]


def random_inputs(seed, *, masked=None, dtype=torch.float32):
    """Three datums of 5, 1 and 6 tokens, some masked; those hold `masked` in every column and output, or what they
    drew."""
    rng = np.random.default_rng(seed)
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1], dtype=dtype)

    def column(low, high):
        return torch.tensor(rng.uniform(low, high, len(mask)), dtype=dtype)

    logprobs = column(-3, -0.1)
    drawn = {
        "policy_logprobs": logprobs,
        **{name: column(0, 2) for name in OUTPUTS[1:]},
        "advantages": column(-2, 2),
        **{name: logprobs + column(-0.5, 0.5) for name in COLUMNS[1:4]},
        **{name: column(-1, 1) for name in COLUMNS[4:]},
    }
    if masked is not None:
        drawn = {name: torch.where(mask > 0, x, masked) for name, x in drawn.items()}
    return LossInputs(
        **{name: drawn[name].requires_grad_() for name in OUTPUTS},
        datum=torch.repeat_interleave(torch.tensor([5, 1, 6])),
        num_datums=3,
        tensors={"token_weights": mask * column(0.1, 1), "loss_mask": mask, **{name: drawn[name] for name in COLUMNS}},
    )


def answer(loss_fn, inputs):
    """(loss, gradient by each output, metrics)."""
    loss, metrics = loss_fn(inputs)
    gradients = torch.autograd.grad(loss, [getattr(inputs, name) for name in OUTPUTS], allow_unused=True)
    return loss.detach(), gradients, {name: float(value) for name, value in metrics.items()}


def same(one, other):
    (loss, gradients, metrics), (other_loss, other_gradients, other_metrics) = one, other
    assert torch.equal(loss, other_loss) and metrics == other_metrics and torch.isfinite(loss)
    for left, right in zip(gradients, other_gradients, strict=True):
        assert (left is None and right is None) or (torch.equal(left, right) and torch.isfinite(left).all())


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize(
    "loss_fn", [losses.cross_entropy, losses.reverse_kl, losses.value_loss, *POLICY_LOSSES], ids=lambda f: f.__name__
)
def test_garbage_under_the_mask_changes_no_bit_of_a_loss(loss_fn, garbage):
    found = answer(loss_fn, random_inputs(0, masked=garbage))
    same(found, answer(loss_fn, random_inputs(0)))
    masked = random_inputs(0).loss_mask == 0
    assert all((gradient[masked] == 0).all() for gradient in found[1] if gradient is not None)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("correction_fn", CORRECTIONS, ids=lambda f: getattr(f, "func", f).__name__)
@pytest.mark.parametrize("loss_fn", [losses.cross_entropy, *POLICY_LOSSES], ids=lambda f: f.__name__)
def test_garbage_under_the_mask_changes_no_bit_of_an_objective(loss_fn, correction_fn, garbage):
    objective = policy_objective(
        AlgorithmConfig(loss_fn=loss_fn, correction_fn=correction_fn, kl_coef=0.1, kl_estimator="k2", entropy_coef=0.1)
    )
    same(answer(objective, random_inputs(1, masked=garbage)), answer(objective, random_inputs(1)))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_under_the_mask_changes_no_bit_of_a_weighted_kl(garbage):
    objective = policy_objective(AlgorithmConfig(loss_fn=losses.ppo, kl_coef=0.1, kl_ratio_weighted=True))
    same(answer(objective, random_inputs(4, masked=garbage)), answer(objective, random_inputs(4)))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_clipped_value_loss_reads_no_masked_token(garbage):
    def clipped(inputs):
        return losses.value_loss(inputs, clip=0.2)

    same(answer(clipped, random_inputs(2, masked=garbage)), answer(clipped, random_inputs(2)))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_correction_of_your_own_may_leave_garbage_under_the_mask(garbage):
    def careless(inputs):
        return torch.where(inputs.loss_mask > 0, 0.5, garbage), {}

    def halved(inputs):
        return torch.full_like(inputs.loss_mask, 0.5), {}

    for loss_fn in (losses.cross_entropy, losses.ppo):
        found, expected = (
            answer(policy_objective(AlgorithmConfig(loss_fn=loss_fn, correction_fn=fn)), random_inputs(3))
            for fn in (careless, halved)
        )
        same(found, expected)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_soft_targets_without_a_weight_are_not_read(garbage):
    def distilled(unread):
        inputs = LossInputs(
            policy_logprobs=torch.tensor([[-1.0, unread], [-2.0, -0.5]]).requires_grad_(),
            datum=torch.zeros(2, dtype=torch.long),
            num_datums=1,
            tensors={
                "token_weights": torch.tensor([0.0, 1.0]),
                "loss_mask": torch.tensor([0.0, 1.0]),
                "soft_weights": torch.tensor([[0.0], [0.5]]),
            },
        )
        loss, metrics = policy_objective(AlgorithmConfig(loss_fn=losses.cross_entropy), inputs.tensors)(inputs)
        (gradient,) = torch.autograd.grad(loss, inputs.policy_logprobs)
        return loss.item(), gradient.tolist(), {name: float(value) for name, value in metrics.items()}

    assert distilled(garbage) == (2.0 + 0.25, [[0.0, 0.0], [-1.0, -0.5]], {"distill/kl": 0.5, "distill/target_frac": 1})


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_value_under_the_mask_reaches_no_advantage_and_no_return(garbage):
    mask_T = torch.tensor([0.0, 1.0, 0.0, 1.0])
    found, expected = (gae(torch.tensor([x, 0.25, x, 0.5]), mask_T, 1.0, gamma=0.9, lam=0.9) for x in (garbage, 0.0))
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


# The sums as they were, products with weights of 0: the same bits for finite numbers.


def multiplied(name, inputs):
    weights, advantages, mask = inputs.token_weights, inputs.advantages, inputs.loss_mask
    difference = torch.where(mask > 0, inputs.policy_logprobs - inputs.old_logprobs, 0.0)
    ratio, trained = difference.clamp(-20, 20).exp(), torch.where(mask > 0, inputs.policy_logprobs, 0.0)
    if name == "cross_entropy":
        return -(weights * inputs.policy_logprobs).sum()
    if name == "reverse_kl":
        return (weights * inputs.teacher_kl).sum()
    if name == "importance_sampling":
        return -(weights * ratio * advantages).sum()
    if name == "ppo":
        return -(weights * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)).sum()
    if name == "cispo":
        return -(weights * ratio.detach().clamp(0.0, 5.0) * advantages * trained).sum()
    if name == "dro":
        return -(weights * (advantages * trained - 0.5 * 0.05 * difference.clamp(-20, 20).square())).sum()
    assert name == "value_loss"
    error = (inputs.predicted_values - inputs.returns).square()
    held = inputs.values + (inputs.predicted_values - inputs.values).clamp(-math.inf, math.inf)
    return (weights * (0.5 * torch.maximum(error, (held - inputs.returns).square()))).sum()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "name", ["cross_entropy", "reverse_kl", "importance_sampling", "ppo", "cispo", "dro", "value_loss"]
)
def test_replacing_masked_terms_gives_the_bits_of_multiplying_them(name, seed):
    inputs = random_inputs(seed)
    same(answer(lambda x: (multiplied(name, x), {}), inputs), (*answer(getattr(losses, name), inputs)[:2], {}))


@pytest.mark.parametrize("seed", range(20))
def test_replacing_masked_terms_of_an_objective_gives_the_bits_of_multiplying_them(seed):
    def previous(inputs):
        difference = torch.where(inputs.loss_mask > 0, inputs.policy_logprobs - inputs.reference_logprobs, 0.0)
        entropy = torch.where(inputs.loss_mask > 0, inputs.entropy, 0.0)
        loss = multiplied("ppo", inputs) + 0.1 * (inputs.token_weights * kl.k3(difference)).sum()
        return loss - 0.2 * (inputs.token_weights * entropy).sum(), {}

    objective = policy_objective(AlgorithmConfig(loss_fn=losses.ppo, kl_coef=0.1, entropy_coef=0.2))
    inputs = random_inputs(seed)
    same(answer(previous, inputs), (*answer(objective, inputs)[:2], {}))

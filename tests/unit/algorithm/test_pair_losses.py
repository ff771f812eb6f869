"""Losses of preference pairs: by hand, in float64, gradients, and as TRL computes them."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from torchtitan_rl.algorithm import pair_losses
from torchtitan_rl.algorithm.pair_losses import (
    alpha_divergence,
    aot_unpaired,
    apo_down,
    apo_zero,
    bco,
    bradley_terry,
    discopop,
    dpo,
    exo,
    forward_kl,
    hinge,
    ipo,
    jensen_shannon,
    nca,
    robust_dpo,
    scored,
    sppo,
)


def numbers(seed=0, num=7, scale=4.0, dtype=torch.float64):
    made = np.random.default_rng(seed).normal(size=(2, num)) * scale
    return tuple(torch.tensor(row, dtype=dtype) for row in made)


def sigma(x):
    return 1 / (1 + np.exp(-x))


def of_one(*, label_smoothing=0.1, beta=0.1):
    """Formulas in NumPy of one pair, c and r the log-ratios, by the names of TRL 1.16's loss types; `conservative` is
    what its "sigmoid" was with label smoothing."""
    e = label_smoothing
    return {
        "sigmoid": lambda c, r: -np.log(sigma(beta * (c - r))),
        "hinge": lambda c, r: max(0.0, 1 - beta * (c - r)),
        "ipo": lambda c, r: ((c - r) - 1 / (2 * beta)) ** 2,
        "exo_pair": lambda c, r: (
            sigma(beta * (c - r)) * (np.log(sigma(beta * (c - r))) - np.log(1 - e))
            + sigma(-beta * (c - r)) * (np.log(sigma(-beta * (c - r))) - np.log(e))
        ),
        "nca_pair": lambda c, r: (
            -np.log(sigma(beta * c)) - 0.5 * np.log(sigma(-beta * c)) - 0.5 * np.log(sigma(-beta * r))
        ),
        "robust": lambda c, r: (
            (-(1 - e) * np.log(sigma(beta * (c - r))) + e * np.log(sigma(-beta * (c - r)))) / (1 - 2 * e)
        ),
        "bco_pair": lambda c, r: -np.log(sigma(beta * c)) - np.log(sigma(-beta * r)),
        "sppo_hard": lambda c, r: (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
        "apo_zero": lambda c, r: 1 - sigma(beta * c) + sigma(beta * r),
        "apo_down": lambda c, r: sigma(beta * c) + 1 - sigma(beta * (c - r)),
        "discopop": lambda c, r: (
            -np.log(sigma(beta * (c - r))) * (1 - sigma(beta * (c - r) / 0.05))
            + np.exp(-beta * (c - r)) * sigma(beta * (c - r) / 0.05)
        ),
        "conservative": lambda c, r: -(1 - e) * np.log(sigma(beta * (c - r))) - e * np.log(sigma(-beta * (c - r))),
    }


OURS = {
    "sigmoid": dpo,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": partial(exo, label_smoothing=0.1),
    "nca_pair": nca,
    "robust": robust_dpo,
    "bco_pair": bco,
    "sppo_hard": sppo,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "conservative": partial(dpo, label_smoothing=0.1),
}


@pytest.mark.parametrize("beta", [0.05, 0.1, 1.0])
@pytest.mark.parametrize("name", OURS)
def test_a_loss_is_trls(name, beta):
    chosen, rejected = numbers()
    expected = [of_one(beta=beta)[name](c, r) for c, r in zip(chosen.numpy(), rejected.numpy())]
    assert OURS[name](chosen, rejected, beta=beta).tolist() == pytest.approx(expected, rel=1e-10, abs=1e-13)
    rounded = OURS[name](*numbers(dtype=torch.float32), beta=beta)
    assert rounded.dtype == torch.float32 and rounded.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


CHOSEN, REJECTED = [1.5, -2.0, 0.25], [-0.5, 1.0, 0.25]


def test_dpo_by_hand():
    # z = 0.3 x (2, -3, 0) = 0.6, -0.9, 0; log(1 + e^-z): log 1.548812 = 0.437488, log 3.459603 = 1.241154, log 2.
    losses = dpo(torch.tensor(CHOSEN), torch.tensor(REJECTED), beta=0.3)
    assert losses.tolist() == pytest.approx([0.437488, 1.241154, math.log(2)], abs=1e-6)
    # The derivative by a chosen log-ratio is -beta sigma(-z): 0.3 x 0.354344 of the first pair.
    chosen = torch.tensor(CHOSEN, requires_grad=True)
    dpo(chosen, torch.tensor(REJECTED), beta=0.3).sum().backward()
    assert chosen.grad.tolist() == pytest.approx([-0.106303, -0.3 * 0.710950, -0.15], abs=1e-6)


def test_a_margin_is_asked_for_beyond_equal():
    even, margin = torch.zeros(1, dtype=torch.float64), 0.7
    assert dpo(even, even, margin=margin).item() == pytest.approx(math.log(1 + math.exp(margin)), rel=1e-12)
    assert bradley_terry(even + 2, even, margin=margin).item() == pytest.approx(math.log(1 + math.exp(-1.3)), rel=1e-12)


def test_bradley_terry_is_trls():
    chosen, rejected = numbers(3)
    expected = [-np.log(sigma(c - r - 0.2)) + 0.01 * (c + r) ** 2 for c, r in zip(chosen.numpy(), rejected.numpy())]
    assert bradley_terry(chosen, rejected, margin=0.2, center=0.01).tolist() == pytest.approx(expected, rel=1e-10)


def test_dpo_is_bradley_terry_of_implicit_rewards():
    chosen, rejected = numbers(4)
    assert torch.allclose(dpo(chosen, rejected, beta=0.3), bradley_terry(0.3 * chosen, 0.3 * rejected), rtol=1e-12)


def test_robust_dpo_is_dpo_on_average_over_flipped_labels():
    chosen, rejected = numbers(5)
    kept, flipped = robust_dpo(chosen, rejected, label_smoothing=0.2), robust_dpo(rejected, chosen, label_smoothing=0.2)
    assert torch.allclose(0.8 * kept + 0.2 * flipped, dpo(chosen, rejected), rtol=1e-12)


def test_conservative_dpo_is_least_where_the_policy_prefers_the_chosen_with_its_probability():
    z = math.log(0.9 / 0.1)
    chosen = torch.tensor([z / 0.1], dtype=torch.float64, requires_grad=True)
    dpo(chosen, torch.zeros(1, dtype=torch.float64), label_smoothing=0.1).sum().backward()
    assert chosen.grad.item() == pytest.approx(0, abs=1e-15)


def test_exo_is_a_kl_and_0_where_the_policy_has_its_labels():
    z = math.log(0.9 / 0.1)
    at = torch.tensor([z / 0.1], dtype=torch.float64)
    assert exo(at, torch.zeros(1, dtype=torch.float64), label_smoothing=0.1).item() == pytest.approx(0, abs=1e-15)
    assert (exo(*numbers(6), label_smoothing=0.1) > 0).all()


def test_sorted_log_ratios_are_compared():
    chosen, rejected = (torch.tensor(row, dtype=torch.float64) for row in ([3.0, -1.0, 2.0], [0.0, 5.0, -2.0]))
    expected = dpo(torch.tensor([-1.0, 2.0, 3.0]).double(), torch.tensor([-2.0, 0.0, 5.0]).double(), beta=0.2)
    assert torch.equal(aot_unpaired(chosen, rejected, beta=0.2), expected)
    order = torch.tensor([2, 0, 1])
    assert aot_unpaired(chosen, rejected[order], beta=0.2).sum() == pytest.approx(expected.sum().item(), rel=1e-15)


def test_scores_of_f_divergences_are_trls():
    chosen, rejected = numbers(7, scale=1.0)
    scores = {
        forward_kl: lambda x: 1 - np.exp(-x),
        jensen_shannon: lambda x: np.log(2) + np.log(sigma(x)),
        partial(alpha_divergence, alpha=0.5): lambda x: (np.exp(-0.5 * x) - 1) / -0.5,
        partial(alpha_divergence, alpha=1): lambda x: x,
    }
    for ours, trls in scores.items():
        expected = [of_one(beta=0.2)["sigmoid"](trls(c), trls(r)) for c, r in zip(chosen.numpy(), rejected.numpy())]
        assert scored(chosen, rejected, score=ours, beta=0.2).tolist() == pytest.approx(expected, rel=1e-10)
    with_hinge = scored(chosen, rejected, score=jensen_shannon, loss_fn=hinge, beta=0.2)
    assert torch.allclose(with_hinge, hinge(jensen_shannon(chosen), jensen_shannon(rejected), beta=0.2))


EVERY = {
    **OURS,
    "aot_unpaired": aot_unpaired,
    "bradley_terry": partial(bradley_terry, margin=0.3, center=0.1),
    "forward_kl": partial(scored, score=forward_kl),
    "jensen_shannon": partial(scored, score=jensen_shannon),
    "alpha": partial(scored, score=alpha_divergence),
}


@pytest.mark.parametrize("name", EVERY)
def test_gradients(name):
    chosen, rejected = (row.requires_grad_() for row in numbers(8, num=4, scale=1.0))
    assert torch.autograd.gradcheck(lambda c, r: EVERY[name](c, r), (chosen, rejected))


@pytest.mark.parametrize("name", [name for name in EVERY if name not in ("forward_kl", "alpha")])
def test_extreme_log_ratios_stay_finite(name):
    far = torch.tensor([0.0, 500.0, -500.0, 40.0], dtype=torch.float64)
    chosen, rejected = far.clone().requires_grad_(), far.flip(0).clone().requires_grad_()
    loss = EVERY[name](chosen, rejected)
    assert torch.isfinite(loss).all()
    for gradient in torch.autograd.grad(loss.sum(), (chosen, rejected)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_pairs_changes_nothing(name):
    chosen, rejected = numbers(9, scale=1.0)
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))
    assert EVERY[name](chosen[order], rejected[order]).sum() == pytest.approx(
        EVERY[name](chosen, rejected).sum().item()
    )


@pytest.mark.parametrize("beta", [0.0, -0.1, math.inf, math.nan])
@pytest.mark.parametrize("name", [name for name in EVERY if name != "bradley_terry"])
def test_a_beta_that_cannot_be(name, beta):
    with pytest.raises(ValueError, match=r"beta=.*must be positive and finite"):
        EVERY[name](*numbers(), beta=beta)


def test_other_arguments_that_cannot_be():
    for function in (dpo, robust_dpo, exo, aot_unpaired):
        for smoothing in (-0.1, 0.5, 1.0, math.nan):
            with pytest.raises(ValueError, match=r"label_smoothing=.*probability of a flipped label"):
                function(*numbers(), label_smoothing=smoothing)
    with pytest.raises(ValueError, match=r"label_smoothing=0: the KL to certain labels is infinite"):
        exo(*numbers(), label_smoothing=0)
    with pytest.raises(ValueError, match=r"tau=0: must be positive"):
        discopop(*numbers(), tau=0)
    for function in (dpo, bradley_terry):
        with pytest.raises(ValueError, match=r"margin=inf: is not finite"):
            function(*numbers(), margin=math.inf)
    with pytest.raises(ValueError, match=r"center=-1: must be finite and not negative"):
        bradley_terry(*numbers(), center=-1)


def test_every_loss_of_the_module_is_tested():
    def inner(function):
        return function.func if isinstance(function, partial) else function

    tested = {inner(function).__name__ for function in EVERY.values()} | {"forward_kl", "jensen_shannon"}
    assert tested | {"alpha_divergence", "loss_of"} == set(pair_losses.__all__)
